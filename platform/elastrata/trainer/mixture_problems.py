"""The problems of a mixture that its data sets tell: what does not go together, or does not do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.shares import wanted_mixture
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.mixture import UNITS
from elastrata_pipelines.phase import Origin, Phase, one_after_another, positions_after

_ALIKE = {
    "tokenizer_fingerprint": "the tokenizer",
    "seq_len": "seq_len",
    "version": "format version",
    "pairs": "pairs",
    "token_dtype": "token_dtype",
}
"""Fields of a manifest that all sources have alike, and what they are called."""


def mixture_problems(part: PhaseKeys, manifests: Sequence[Manifest]) -> list[str]:
    """A line for each source that cannot be mixed with the others.

    Args:
        part: the phase.
        manifests: of its sources.
    """
    return [*_unlike(part, manifests), *_twice(part, manifests), *_too_small(part, manifests)]


def _unlike(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    places = list(part.data.places.items())
    for field, called in _ALIKE.items():
        values = [getattr(manifest, field) for manifest in manifests]
        usual = Counter(values).most_common(1)[0][0]
        example = places[values.index(usual)][1]
        for (key, place), value in zip(places, values, strict=True):
            if value != usual:
                yield (
                    f"data.{key}: {place}: {called} {value}, expected {usual}, as in {example}: "
                    "all sources have one"
                )


def _twice(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Lines for data sets that are copies of others: what was read of one would be taken for what
    was read of the other."""
    known = dict[str, str]()
    for (key, place), manifest in zip(part.data.places.items(), manifests, strict=True):
        first = known.setdefault(manifest.fingerprint, place)
        if first != place:
            yield f"data.{key}: {place}: the same data set as {first}: expected one of them"


def _too_small(part: PhaseKeys, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Lines where a batch would have a sample of a source twice."""
    mixture = wanted_mixture(part.data, manifests, 1)
    for number, (manifest, source) in enumerate(zip(manifests, part.data.sources, strict=True)):
        share = max(mixture.legs[0].shares[number], mixture.last_shares[number]) / UNITS
        taken = math.ceil(share * part.batch_size)
        if taken > manifest.samples:
            yield (
                f"data.sources.{number}.weight: {source.weight:g}: a batch of {part.batch_size} "
                f"takes {taken:,} samples of {source.name}, which has {manifest.samples:,}; "
                "expected a smaller weight, or a smaller batch_size"
            )


def limit_problems(
    recipe: Recipe, phases: Sequence[Phase], origin: Origin[str] | None
) -> list[str]:
    """A line for each source that the run would go through more often than it may.

    Args:
        recipe: of the run, its lengths in steps.
        phases: that it asks for.
        origin: where it goes on from another one.
    """
    try:
        placed = one_after_another(phases, origin)
    except ValueError:
        return [_all_exhausted(recipe, phases)]
    sizes = [phase.size for phase in placed]
    data = [[url for url, _ in phase.batches.data_sets] for phase in placed]
    lines = []
    for number, last in enumerate(accumulate(size.steps for size in sizes)):
        if any(placed[number].limits) and last > (origin.step if origin else 0):
            taken = positions_after(last, sizes, data, origin)
            prefix = f"phases.{number}." if recipe.phases else ""
            lines += [prefix + line for line in _too_often(recipe, number, placed[number], taken)]
    return lines


def _too_often(recipe: Recipe, number: int, phase: Phase, taken: dict[str, int]) -> Iterator[str]:
    data = recipe.parts[number].data
    for at, (source, found, limit) in enumerate(
        zip(data.sources, phase.batches.sources, phase.limits, strict=True)
    ):
        count = taken.get(found.url, 0)
        if limit is None or count <= limit or phase.redistributes:
            continue
        least = math.ceil(count / found.manifest.samples * 100) / 100
        yield (
            f"data.sources.{at}.max_epochs: {source.max_epochs:g}: {count:,} samples of "
            f"{source.name} are taken by the end of the phase, of {found.manifest.samples:,}: "
            f"expected at least {least:.2f}, fewer steps, a smaller weight, or "
            "data.when_exhausted redistribute"
        )


def _all_exhausted(recipe: Recipe, phases: Sequence[Phase]) -> str:
    """The line where no source is left that could have the share of the others."""
    samples = sum(phase.size.samples(phase.steps) for phase in phases)
    limits = {
        source.name: limit
        for phase in phases
        for source, limit in zip(phase.batches.sources, phase.limits, strict=False)
        if limit is not None
    }
    told = ", ".join(f"{limit:,} of {name}" for name, limit in limits.items())
    return (
        f"data.when_exhausted: redistribute: {recipe.steps_in_all:,} steps take {samples:,} "
        f"samples in all, and max_epochs leaves {told}: expected fewer steps, or a source without "
        "limit"
    )
