"""The spec of a recipe's data set: what a model must know of it, also before it is prepared."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.recipe.data import DataConfig
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError, nearest
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
    key, place = next(iter(data.places.items()))
    storage = Storage(place)
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
            f"data.{key}: {place}: no data set here, whose tokenizer gives the model its "
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
        if part.data.prepare is None:
            problems.append(
                f"{prefix}data.prepare: missing: expected how to make the data set from text"
            )
            continue
        try:
            plans = _of_data(part.data, part.data.prepare)
        except UserError as error:
            problems += [f"{prefix}{line}" for line in error.problems]
            continue
        for path, config in plans.items():
            first_path, first = next(iter(by_path.items()), (path, config))
            own = config
            if path != first_path and own.tokenizer == first.tokenizer and first.tokenizer.train:
                own = _with_tokenizer_of(first_path, config)
            if by_path.setdefault(path, own) != own:
                problems.append(
                    f"{prefix}data.prepare: differs from that of an earlier phase, but {path} is "
                    "one data set"
                )
    if problems:
        raise UserError(*problems)
    return by_path


def _of_data(data: DataConfig, config: PrepareConfig) -> dict[str, PrepareConfig]:
    """How to make the data sets of a phase: of a mixture one for each source of the text, with one
    tokenizer, trained on all of it.

    Raises:
        UserError: the sources are not those of the text.
    """
    if not data.sources:
        return {data.path: config}
    texts = {str(source.name): source for source in config.all_sources}
    named = {
        source.name: place for source, place in zip(data.sources, data.places.values(), strict=True)
    }
    problems = [
        f"data.sources.{number}.name: {name}: not among the sources of data.prepare, "
        f"{', '.join(texts)}{nearest(name, texts)}"
        for number, name in enumerate(named)
        if name not in texts
    ]
    problems += [
        f"data.prepare.sources: {name}: not among data.sources, {', '.join(named)}"
        f"{nearest(name, named)}"
        for name in texts
        if name not in named
    ]
    if isinstance(config.held_out, tuple):
        problems.append("data.prepare.held_out: sources: expected a fraction, held out of each")
    if problems:
        raise UserError(*problems)
    tokenizer = config.tokenizer
    if tokenizer.train and not tokenizer.sources:
        tokenizer = tokenizer.model_copy(update={"sources": config.all_sources})
    return {
        place: config.model_copy(update={"sources": (texts[name],), "tokenizer": tokenizer})
        for name, place in named.items()
    }


def _with_tokenizer_of(data: str, config: PrepareConfig) -> PrepareConfig:
    tokenizer = TokenizerConfig(load=Storage(data).uri(TOKENIZER_DIR))
    return config.model_copy(update={"tokenizer": tokenizer})
