"""The shares of a mixture's sources: from weights and data sets to parts of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from elastrata.recipe.data import DataConfig
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.mixture import UNITS, Leg, Mixture, in_units


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
