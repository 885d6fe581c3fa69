"""The data sets of a recipe: their form, the shares of a mixture, and a run's length in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from elastrata.recipe.recipe import DataConfig, PhaseKeys, Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format import MANIFEST, Manifest, Vocabulary
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.groups import steps_for
from elastrata_pipelines.mixture import UNITS, Leg, Mixture, in_units
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


def wanted_mixture(data: DataConfig, manifests: Sequence[Manifest], samples: int) -> Mixture:
    """The mixture that a phase asks for, as if there were enough of every source.

    Args:
        data: its sources.
        manifests: theirs.
        samples: of the phase.
    """
    first = _samples(data, data.weights, manifests)
    if data.final_weights is None or not any(data.final_weights):
        return Mixture((Leg(shares=first),))
    last = _samples(data, data.final_weights, manifests)
    return Mixture((Leg(shares=first, final_shares=last, length=samples),))


def mean_tokens(data: DataConfig, manifests: Sequence[Manifest]) -> float:
    """Tokens of a sample, on average over a phase in which shares stay or change evenly."""
    mixture = wanted_mixture(data, manifests, 1)
    shares = map(sum, zip(mixture.legs[0].shares, mixture.last_shares, strict=True))
    means = (manifest.tokens / manifest.samples for manifest in manifests)
    return sum(share * mean for share, mean in zip(shares, means, strict=True)) / (2 * UNITS)


def without_limits(recipe: Recipe) -> Recipe:
    """The recipe as if every source may be read any number of times."""

    def unlimited(part: PhaseKeys) -> PhaseKeys:
        sources = tuple(one.model_copy(update={"max_epochs": None}) for one in part.data.sources)
        data = part.data.model_copy(update={"sources": sources})
        return part.model_copy(update={"data": data})

    if recipe.phases:
        return recipe.model_copy(update={"phases": tuple(map(unlimited, recipe.phases))})
    return recipe.model_copy(update={"data": unlimited(recipe).data})


def _samples(
    data: DataConfig, weights: Sequence[float], manifests: Sequence[Manifest]
) -> tuple[int, ...]:
    """The shares of samples that go with weights."""
    if data.weight_by == "samples" or not any(weights):
        return in_units(weights if any(weights) else [1.0] * len(weights))
    return in_units(
        [
            Fraction(weight) * manifest.samples / manifest.tokens
            for weight, manifest in zip(weights, manifests, strict=True)
        ]
    )


Part = TypeVar("Part", bound=PhaseKeys)


def in_steps(recipe: Recipe) -> Recipe:
    """The recipe with `steps` in the place of `epochs` and `tokens`, by the data sets that are
    there; a phase whose data set is not stays as it is.

    Raises:
        UserError: a data set cannot be read, or the steps are too few for the recipe's schedule.
    """
    if all(part.steps is not None for part in recipe.parts):
        return recipe
    if recipe.phases:
        counted = recipe.model_copy(update={"phases": tuple(map(_counted, recipe.phases))})
    else:
        counted = _counted(recipe)
    if problems := [line for _, line in cross_field_problems(counted)]:
        raise UserError(*problems)
    return counted


def as_if_full(recipe: Recipe, seq_len: int) -> Recipe:
    """The recipe with `steps` in the place of `tokens`, of samples that are all of full length, as
    the planner counts them: for where the data that would tell is not there.

    Args:
        recipe: of which a phase that says `epochs` stays as it is.
        seq_len: tokens of every sample.
    """
    if recipe.phases:
        phases = tuple(full_part(part, seq_len) for part in recipe.phases)
        return recipe.model_copy(update={"phases": phases})
    return full_part(recipe, seq_len)


def full_part(part: Part, seq_len: int) -> Part:
    """A phase as if its batches were full throughout."""
    if part.steps is not None or part.tokens is None:
        return part
    samples = -(-part.tokens // seq_len)
    steps = steps_for(samples, full=part.batch_size, warmup=part.batch_size_warmup)
    return part.model_copy(update={"steps": steps, "tokens": None})


def samples_of(part: PhaseKeys, manifests: Sequence[Manifest]) -> int:
    """Samples of a phase whose length is given in epochs or tokens of its data.

    Args:
        part: the phase.
        manifests: of its data sets.
    """
    if part.epochs is not None:
        return max(1, round(part.epochs * manifests[0].samples))
    assert part.tokens is not None, part
    if part.data.sources:
        return max(1, math.ceil(part.tokens / mean_tokens(part.data, manifests)))
    return max(1, -(-part.tokens * manifests[0].samples // manifests[0].tokens))


def _counted(part: Part) -> Part:
    data_sets = [Storage(place) for place in part.data.places.values()]
    if part.steps is not None or not all(data_set.exists(MANIFEST) for data_set in data_sets):
        return part
    steps = steps_for(
        samples_of(part, list(map(Manifest.read, data_sets))),
        full=part.batch_size,
        warmup=part.batch_size_warmup,
    )
    return part.model_copy(update={"steps": steps, "epochs": None, "tokens": None})
