"""Speeds by node: the factors that a recipe gives, for the nodes that a group's workers are on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastrata.cluster.nodes import ACCELERATOR, NODE_GROUP, nodes
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.speeds import FixedSpeeds, SpeedSource, of_groups, quantized

Node = Mapping[str, Any]


def names_of(node: Node) -> tuple[str, ...]:
    """The names by which a recipe may mean a node: its own ones first, then those of its kind."""
    own = (node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"])
    group = (node.get("Labels") or {}).get(NODE_GROUP)
    return (*own, *([group] if group else []), *devices_of(node))


def devices_of(node: Node) -> list[str]:
    """The names of a node's devices: of its GPUs as Ray has them, such as A100; else CPU."""
    names = [r.removeprefix(ACCELERATOR) for r in node["Resources"] if r.startswith(ACCELERATOR)]
    return sorted(names) or ["CPU"]


def name_problems(recipe: Recipe, gpus: float) -> list[str]:
    """A line for each name in `workers.speeds` and `workers.micro_batch_tokens` that no node of the
    cluster has.

    Args:
        recipe: with the key.
        gpus: that each worker claims.

    Raises:
        UserError: the speeds cannot be measured.
    """
    speeds = recipe.workers.speeds
    if gpus and recipe.compile and speeds == "measured":
        raise UserError(
            "workers.speeds: measured: expected compile: false on GPUs, as times are taken at the "
            "bounds of a block; or equal, or factors"
        )
    factors = {} if isinstance(speeds, str) else speeds
    return [
        *unknown_names("speeds", factors),
        *unknown_names("micro_batch_tokens", recipe.workers.micro_batch_tokens),
    ]


def unknown_names(key: str, values: Mapping[str, float]) -> list[str]:
    """A line for each name that no node of the cluster has.

    Args:
        key: of the section `workers`.
        values: its own, by name.
    """
    if not values:
        return []
    alive = [node for node in nodes() if node["Alive"]]
    known = {name for node in alive for name in names_of(node)}
    devices = sorted({name for node in alive for name in devices_of(node)})
    return [
        f"workers.{key}.{name}: {value:.10g}: no node or device of that name in the cluster, whose "
        f"devices are {', '.join(devices)}{nearest(name, known)}"
        for name, value in values.items()
        if name not in known
    ]


@dataclass(frozen=True, kw_only=True)
class FixedFactors:
    """The speeds of any group of workers, from factors. A value."""

    factors: Mapping[str, float]
    """By the name of a node or a device; of all others 1."""
    copies: int
    """So many neighbouring ranks have the same rows."""
    repeats: int
    """The ranks that have all rows between them come so many times over."""

    def __call__(self, node_ids: Sequence[str]) -> SpeedSource:
        """The speeds of a group, whose ranks are on these nodes."""
        paces = list(self._paces(node_ids))
        groups = of_groups(paces, copies=self.copies, repeats=self.repeats)
        return FixedSpeeds(quantized(groups))

    def _paces(self, node_ids: Sequence[str]) -> Iterable[float]:
        by_id = {node["NodeID"]: names_of(node) for node in nodes()}
        for node in node_ids:
            names = [name for name in by_id.get(node, (node,)) if name in self.factors]
            yield self.factors[names[0]] if names else 1.0
