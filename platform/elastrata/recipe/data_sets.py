"""Data sets of a recipe: their format, the shares of a mixture, and the length of a run in
steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from elastrata.recipe.recipe import DataConfig, PhaseKeys, Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.format import MANIFEST, Manifest, Vocabulary
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.groups import count_steps_for
from elastrata_pipelines.mixture import UNITS, Leg, Mixture, shares_to_units
from elastrata_pipelines.preparation import PrepareConfig, TokenizerConfig
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """Format of the samples of a data set."""

    vocabulary: Vocabulary
    seq_len: int
    """Largest number of tokens of a sample."""
    pairs: bool
    """Whether samples are sentence pairs."""
    prepared: bool
    """True if the data set exists; otherwise the values are those that `elastrata prepare` would
    produce."""


def data_spec(recipe: Recipe) -> DataSpec:
    """Return the format of the first phase's data set, or the requested format if it does not exist
    yet.

    Raises:
        UserError: the vocabulary size is unknown until the data set is prepared.
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
            f"data.{key}: {place}: no data set here; its tokenizer determines the size of "
            "the model, so make it first with `elastrata prepare`"
        )
    size = prepare.tokenizer.vocab_size
    return DataSpec(
        # Only the size matters before training, so the ids are placeholders.
        vocabulary=Vocabulary(size=size, pad_id=0, mask_id=1, special_ids=(), continuation_ids=()),
        seq_len=prepare.seq_len,
        pairs=prepare.pairs,
        prepared=False,
    )


def preparations(recipe: Recipe) -> dict[str, PrepareConfig]:
    """Return the preparation of each data set by folder or URL, in the order of phases.

    Raises:
        UserError: a phase has no `data.prepare`.
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
            plans = _preparations_of_phase(part.data, part.data.prepare)
        except UserError as error:
            problems += [f"{prefix}{line}" for line in error.problems]
            continue
        for path, config in plans.items():
            first_path, first = next(iter(by_path.items()), (path, config))
            own = config
            if path != first_path and own.tokenizer == first.tokenizer and first.tokenizer.train:
                # A run has one tokenizer. A later phase that requests the training of the same one
                # loads it from the first data set.
                own = _replace_tokenizer(first_path, config)
            if by_path.setdefault(path, own) != own:
                problems.append(
                    f"{prefix}data.prepare: differs from that of an earlier phase, but {path} is "
                    "one data set"
                )
    if problems:
        raise UserError(*problems)
    return by_path


def _preparations_of_phase(data: DataConfig, config: PrepareConfig) -> dict[str, PrepareConfig]:
    """Return the preparation of each data set of a phase.

    A mixture has one data set for each source of text and one tokenizer, trained on all sources.

    Raises:
        UserError: the sources of the mixture and of the text differ.
    """
    if not data.sources:
        return {data.path: config}
    texts = {str(source.name): source for source in config.all_sources}
    places_by_name = {
        source.name: place for source, place in zip(data.sources, data.places.values(), strict=True)
    }
    problems = [
        f"data.sources.{number}.name: {name}: not among the sources of data.prepare, "
        f"{', '.join(texts)}{suggest_nearest(name, texts)}"
        for number, name in enumerate(places_by_name)
        if name not in texts
    ]
    problems += [
        f"data.prepare.sources: {name}: not among data.sources, {', '.join(places_by_name)}"
        f"{suggest_nearest(name, places_by_name)}"
        for name in texts
        if name not in places_by_name
    ]
    if isinstance(config.held_out, tuple):
        problems.append(
            "data.prepare.held_out: sources: expected a fraction, to hold out of each source"
        )
    if problems:
        raise UserError(*problems)
    tokenizer = config.tokenizer
    # Each data set would otherwise train a different tokenizer on its single source.
    if tokenizer.train and not tokenizer.sources:
        tokenizer = tokenizer.model_copy(update={"sources": config.all_sources})
    return {
        place: config.model_copy(update={"sources": (texts[name],), "tokenizer": tokenizer})
        for name, place in places_by_name.items()
    }


def _replace_tokenizer(data: str, config: PrepareConfig) -> PrepareConfig:
    """Return a preparation that loads its tokenizer from a data set."""
    tokenizer = TokenizerConfig(load=Storage(data).uri(TOKENIZER_DIR))
    return config.model_copy(update={"tokenizer": tokenizer})


def requested_mixture(data: DataConfig, manifests: Sequence[Manifest], samples: int) -> Mixture:
    """Return the mixture that a phase requests, assuming an unlimited supply of every source.

    Args:
        data: sources of the phase.
        manifests: manifests of the sources.
        samples: number of samples of the phase.
    """
    first = _sample_shares(data, data.weights, manifests)
    if data.final_weights is None or not any(data.final_weights):
        return Mixture((Leg(shares=first),))
    last = _sample_shares(data, data.final_weights, manifests)
    return Mixture((Leg(shares=first, final_shares=last, length=samples),))


def mean_tokens(data: DataConfig, manifests: Sequence[Manifest]) -> float:
    """Return the mean number of tokens per sample over a phase with constant or linearly changing
    shares."""
    mixture = requested_mixture(data, manifests, 1)
    # The mean of linearly changing shares is that of the first and the last ones.
    shares = map(sum, zip(mixture.legs[0].shares, mixture.last_shares, strict=True))
    means = (manifest.tokens / manifest.samples for manifest in manifests)
    return sum(share * mean for share, mean in zip(shares, means, strict=True)) / (2 * UNITS)


def remove_epoch_limits(recipe: Recipe) -> Recipe:
    """Return the recipe without limits on the epochs of sources."""

    def unlimited(part: PhaseKeys) -> PhaseKeys:
        sources = tuple(one.model_copy(update={"max_epochs": None}) for one in part.data.sources)
        data = part.data.model_copy(update={"sources": sources})
        return part.model_copy(update={"data": data})

    if recipe.phases:
        return recipe.model_copy(update={"phases": tuple(map(unlimited, recipe.phases))})
    return recipe.model_copy(update={"data": unlimited(recipe).data})


def _sample_shares(
    data: DataConfig, weights: Sequence[float], manifests: Sequence[Manifest]
) -> tuple[int, ...]:
    """Return the shares of samples that correspond to weights."""
    if data.weight_by == "samples" or not any(weights):
        return shares_to_units(weights if any(weights) else [1.0] * len(weights))
    return shares_to_units(
        [
            # Fractions keep the shares independent of floating-point rounding.
            Fraction(weight) * manifest.samples / manifest.tokens
            for weight, manifest in zip(weights, manifests, strict=True)
        ]
    )


Part = TypeVar("Part", bound=PhaseKeys)


def resolve_steps(recipe: Recipe) -> Recipe:
    """Return the recipe with `epochs` and `tokens` converted to `steps`. Phases without an existing
    data set stay unchanged.

    Raises:
        UserError: a data set cannot be read, or the recipe's schedule needs more steps.
    """
    if all(part.steps is not None for part in recipe.parts):
        return recipe
    if recipe.phases:
        recipe_in_steps = recipe.model_copy(
            update={"phases": tuple(map(_count_steps, recipe.phases))}
        )
    else:
        recipe_in_steps = _count_steps(recipe)
    # Rules about warm-up and decay could not be checked without the number of steps.
    if problems := [line for _, line in cross_field_problems(recipe_in_steps)]:
        raise UserError(*problems)
    return recipe_in_steps


def assume_full_samples(recipe: Recipe, seq_len: int) -> Recipe:
    """Return the recipe with `tokens` converted to `steps` of full-length samples, as the planner
    counts them. Phases with `epochs` stay unchanged.

    Args:
        recipe: recipe whose data sets may be missing.
        seq_len: tokens of every sample.
    """
    if recipe.phases:
        phases = tuple(assume_full_phase(part, seq_len) for part in recipe.phases)
        return recipe.model_copy(update={"phases": phases})
    return assume_full_phase(recipe, seq_len)


def assume_full_phase(part: Part, seq_len: int) -> Part:
    """Return a phase with `tokens` converted to `steps` of full-length samples."""
    if part.steps is not None or part.tokens is None:
        return part
    samples = -(-part.tokens // seq_len)
    steps = count_steps_for(samples, full=part.batch_size, warmup=part.batch_size_warmup)
    return part.model_copy(update={"steps": steps, "tokens": None})


def count_samples(part: PhaseKeys, manifests: Sequence[Manifest]) -> int:
    """Return the number of samples of a phase with a length in epochs or tokens.

    Args:
        part: phase of the recipe.
        manifests: manifests of the phase's data sets.
    """
    if part.epochs is not None:
        # A fraction of an epoch may round to zero samples.
        return max(1, round(part.epochs * manifests[0].samples))
    assert part.tokens is not None, part
    if part.data.sources:
        return max(1, math.ceil(part.tokens / mean_tokens(part.data, manifests)))
    return max(1, -(-part.tokens * manifests[0].samples // manifests[0].tokens))


def _count_steps(part: Part) -> Part:
    """Return a phase with its length in steps if its data sets exist."""
    data_sets = [Storage(place) for place in part.data.places.values()]
    if part.steps is not None or not all(data_set.exists(MANIFEST) for data_set in data_sets):
        return part
    steps = count_steps_for(
        count_samples(part, list(map(Manifest.read, data_sets))),
        full=part.batch_size,
        warmup=part.batch_size_warmup,
    )
    return part.model_copy(update={"steps": steps, "epochs": None, "tokens": None})
