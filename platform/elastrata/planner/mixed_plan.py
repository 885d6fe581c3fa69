"""The plan of a recipe on a cluster of several kinds of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.core.workload import model_spec
from elastrata.planner.advice import KindAdvice, Offer, advice
from elastrata.planner.cluster import Cluster
from elastrata.planner.forecast import Forecast
from elastrata.planner.mixed import Kind
from elastrata.planner.mixed_search import MixedForecast, least_memory, mixed_search
from elastrata.planner.plan import machine_of, problems_of, recipe_keys, tensor_sizes
from elastrata.planner.search import search
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.length import full_part
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MixedPlan:
    """The best of all ways to divide the model over several kinds, and what they are worth."""

    model: ModelSpec
    kinds: tuple[Kind, ...]
    batch_size: int
    steps: int
    families: tuple[MixedForecast, ...]
    """The fastest first."""
    advice: tuple[KindAdvice, ...]
    """About each kind."""

    @property
    def devices(self) -> int:
        """Of all kinds."""
        return sum(kind.cluster.devices for kind in self.kinds)

    @property
    def name(self) -> str:
        """Such as `8xA100-80GB + 16xT4`."""
        return " + ".join(f"{kind.cluster.devices}x{kind.name}" for kind in self.kinds)


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A recipe's layouts on any of its cluster's kinds."""

    model: ModelSpec
    batch_size: int
    steps: int
    sizes: Sequence[int]

    def mixed(self, kinds: Sequence[Kind], *, in_stages: bool = True) -> tuple[MixedForecast, ...]:
        return mixed_search(
            self.model,
            kinds,
            batch_size=self.batch_size,
            steps=self.steps,
            tensor_sizes=self.sizes,
            in_stages=in_stages,
        )

    def best(self, kinds: Sequence[Kind]) -> Forecast | None:
        if len(kinds) > 1:
            return next(iter(self.mixed(kinds)), None)
        found = search(
            self.model,
            kinds[0].cluster,
            kinds[0].machine,
            batch_size=self.batch_size,
            steps=self.steps,
            tensor_sizes=self.sizes,
        )
        return next(iter(found.forecasts), None)


def mixed_plan(recipe: Recipe, part: PhaseKeys, clusters: Sequence[Cluster]) -> MixedPlan:
    """Searches the layouts of one phase of a recipe on all kinds together, and without each.
    Samples count as if all were of full length.

    Args:
        recipe: what is to be trained.
        part: one of its phases.
        clusters: the kinds that it is to be trained on.

    Raises:
        UserError: the model fits under no layout: a line for each kind that is in its way.
    """
    at, kinds = _search_of(recipe, part, clusters)
    families = at.mixed(kinds)
    if not families:
        raise UserError(*_misfits(at, kinds))
    return MixedPlan(
        model=at.model,
        kinds=kinds,
        batch_size=at.batch_size,
        steps=at.steps,
        families=families,
        advice=advice(families[0], [_offer(kind) for kind in kinds], _without(at, kinds)),
    )


def dealt_forecasts(
    recipe: Recipe, part: PhaseKeys, clusters: Sequence[Cluster]
) -> tuple[ModelSpec, tuple[MixedForecast, ...]]:
    """The model of a recipe, and its layouts without stages on several kinds that fit, the fastest
    first.

    Args:
        recipe: what is to be trained.
        part: one of its phases.
        clusters: the kinds that it is to be trained on.

    Raises:
        UserError: the model fits under no layout: a line for each kind that is in its way.
    """
    at, kinds = _search_of(recipe, part, clusters)
    found = at.mixed(kinds, in_stages=False)
    if not found:
        raise UserError(*_misfits(at, kinds))
    return at.model, found


def mixed_keys(recipe: Recipe, forecast: MixedForecast, seq_len: int) -> dict[str, object]:
    """The recipe's keys, by dotted path, that make it train so, where they differ from what it
    says. Micro-batches of several sizes are found by the run itself."""
    keys = recipe_keys(recipe, forecast.layout, seq_len)
    if forecast.layout.pipeline == 1 and recipe.micro_batch_tokens != "auto":
        keys["micro_batch_tokens"] = "auto"
    return keys


def _search_of(
    recipe: Recipe, part: PhaseKeys, clusters: Sequence[Cluster]
) -> tuple[_Search, tuple[Kind, ...]]:
    spec = data_spec(recipe)
    part = full_part(part, spec.seq_len)
    if part.batch_size < 1:
        raise UserError("batch_size: 0: expected at least 1")
    at = _Search(
        model=model_spec(recipe.workload, spec.vocabulary, spec.seq_len),
        batch_size=part.batch_size,
        steps=part.num_steps,
        sizes=tensor_sizes(recipe),
    )
    return at, tuple(Kind(cluster=one, machine=machine_of(recipe, one)) for one in clusters)


def runnable(recipe: Recipe, made: MixedPlan) -> MixedForecast | None:
    """The fastest layout that recipes of this version can say."""
    length = made.model.seq_len
    return next((f for f in made.families if not problems_of(recipe, f.layout, length)), None)


def _offer(kind: Kind) -> Offer:
    cluster = kind.cluster
    price = None if cluster.price is None else cluster.price * cluster.devices
    return Offer(device=kind.name, devices=cluster.devices, price=price)


def _without(at: _Search, kinds: Sequence[Kind]) -> Callable[[Offer], Forecast | None]:
    def best(offer: Offer) -> Forecast | None:
        return at.best([kind for kind in kinds if kind.name != offer.device])

    return best


def _misfits(at: _Search, kinds: Sequence[Kind]) -> list[str]:
    """Why nothing fits: a line for every kind on which the model fits under no layout."""
    devices = sum(kind.cluster.devices for kind in kinds)
    if devices > at.batch_size * max(at.sizes):
        return [
            f"--cluster: {devices} devices: expected at most batch_size ({at.batch_size}), a "
            "sample for each that has its own"
        ]
    lines = []
    for kind in kinds:
        needed, room = least_memory(at.model, kind, kinds, at.sizes), kind.cluster.device
        if needed > room.memory_bytes:
            lines.append(
                f"--cluster: devices: {kind.name}: the model fits on it under no layout of all "
                f"{devices} devices: it is to need at least {needed / _GIB:.1f} GiB, and has "
                f"{room.memory_bytes / _GIB:.1f}{_remedy(at, kinds, kind)}"
            )
    return lines or [
        f"--cluster: {devices} devices: the model fits under no layout of all kinds together: "
        "devices of each kind must be a multiple of a tensor-parallel group's or a stage's"
    ]


def _remedy(at: _Search, kinds: Sequence[Kind], kind: Kind) -> str:
    others = [other for other in kinds if other is not kind]
    if at.best(others) is None:
        return ""
    return "; without this kind the others train it"
