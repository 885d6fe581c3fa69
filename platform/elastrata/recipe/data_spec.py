"""The spec of a recipe's data set: what a model must know of it, also before it is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.preparation import PrepareConfig, TokenizerConfig
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The form of samples."""

    vocabulary: Vocabulary
    seq_len: int
    """No sample is longer."""
    pairs: bool
    """Whether samples are sentence pairs."""
    prepared: bool
    """Whether the data set is there; else this is what `elastrata prepare` is asked for."""


def data_spec(recipe: Recipe) -> DataSpec:
    """The spec of the (first phase's) data set, of the one that is asked for where it is missing.

    Raises:
        UserError: the size of the vocabulary is not known before the data is prepared.
    """
    data = recipe.parts[0].data
    storage = Storage(data.path)
    if manifest := Manifest.find(storage):
        return DataSpec(
            vocabulary=manifest.vocabulary,
            seq_len=manifest.seq_len,
            pairs=manifest.pairs,
            prepared=True,
        )
    prepare = data.prepare
    if prepare is None or prepare.tokenizer.train is None:
        raise UserError(
            f"data.path: {data.path}: no data set here, whose tokenizer gives the model its "
            "size; make it with `elastrata prepare`"
        )
    size = prepare.tokenizer.vocab_size
    return DataSpec(
        vocabulary=Vocabulary(size=size, pad_id=0, mask_id=1, special_ids=(), continuation_ids=()),
        seq_len=prepare.seq_len,
        pairs=prepare.pairs,
        prepared=False,
    )


def preparations(recipe: Recipe) -> dict[str, PrepareConfig]:
    """How to make each of its data sets, by folder or URL, in the order of its phases.

    A run has one tokenizer: a later phase whose data set asks for the training of the same one
    takes that of the first.

    Raises:
        UserError: a phase does not say how.
    """
    by_path: dict[str, PrepareConfig] = {}
    problems = []
    for number, part in enumerate(recipe.parts):
        prefix = f"phases.{number}." if recipe.phases else ""
        path, config = part.data.path, part.data.prepare
        if config is None:
            problems.append(
                f"{prefix}data.prepare: missing: expected how to make the data set from text"
            )
            continue
        first_path, first = next(iter(by_path.items()), (path, config))
        if path != first_path and config.tokenizer == first.tokenizer and first.tokenizer.train:
            config = _with_tokenizer_of(first_path, config)
        if by_path.setdefault(path, config) != config:
            problems.append(
                f"{prefix}data.prepare: differs from that of an earlier phase, but {path} is one "
                "data set"
            )
    if problems:
        raise UserError(*problems)
    return by_path


def _with_tokenizer_of(data: str, config: PrepareConfig) -> PrepareConfig:
    tokenizer = TokenizerConfig(load=Storage(data).uri(TOKENIZER_DIR))
    return config.model_copy(update={"tokenizer": tokenizer})
