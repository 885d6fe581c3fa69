"""The preparations of a recipe: the data sets that `elastrata prepare` makes for it."""

from __future__ import annotations

from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.preparation import PrepareConfig, TokenizerConfig
from elastrata_pipelines.storage import Storage


def preparations(recipe: Recipe) -> dict[str, PrepareConfig]:
    """How to make each of its data sets, by folder or URL, in the order of its phases.

    A run has one tokenizer: a later phase whose data set asks for the training of the same one
    takes that of the first.

    Raises:
        UserError: a phase does not say how.
    """
    found: dict[str, PrepareConfig] = {}
    problems = []
    for number, part in enumerate(recipe.parts):
        prefix = f"phases.{number}." if recipe.phases else ""
        path, config = part.data.path, part.data.prepare
        if config is None:
            problems.append(
                f"{prefix}data.prepare: missing: expected how to make the data set from text"
            )
            continue
        first_path, first = next(iter(found.items()), (path, config))
        if path != first_path and config.tokenizer == first.tokenizer and first.tokenizer.train:
            config = _with_tokenizer_of(first_path, config)
        if found.setdefault(path, config) != config:
            problems.append(
                f"{prefix}data.prepare: differs from that of an earlier phase, but {path} is one "
                "data set"
            )
    if problems:
        raise UserError(*problems)
    return found


def _with_tokenizer_of(data: str, config: PrepareConfig) -> PrepareConfig:
    tokenizer = TokenizerConfig(load=Storage(data).uri(TOKENIZER_DIR))
    return config.model_copy(update={"tokenizer": tokenizer})
