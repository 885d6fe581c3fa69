"""The share of the cluster that a run takes, where its recipe says `auto`: GPUs and workers."""

from __future__ import annotations

from collections.abc import Mapping

from elastrata.cluster.nodes import launches_nodes
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from elastrata.trainer.preflight import cluster_problems
from elastrata_pipelines.errors import UserError

CPUS_OF_A_WORKER = 2
"""CPUs of a cluster without GPUs, for every worker under `workers.max: auto`: one computes, the
other one reads data and runs Ray."""


def gpus_per_worker(recipe: Recipe, resources: Mapping[str, float]) -> float:
    """GPUs that each worker claims.

    Raises:
        UserError: `auto`, and the cluster has yet to launch the nodes that would tell.
    """
    is_open = recipe.workers.gpus == "auto"
    if is_open and cluster_problems(recipe, 0.0, resources) and launches_nodes():
        raise UserError(
            "workers.gpus: auto: the cluster has no nodes for the workers yet to look at; "
            "expected a number, 0 for CPUs"
        )
    return recipe.workers.gpus_each(resources.get("GPU", 0.0))


def with_workers(recipe: Recipe, gpus: float, resources: Mapping[str, float]) -> Recipe:
    """The recipe with a number as `workers.max`.

    Args:
        recipe: comes back as it is where it has one.
        gpus: that each worker claims.
        resources: of the cluster, by Ray's names.

    Raises:
        UserError: with so many workers something else in the recipe cannot be.
    """
    if recipe.workers.max != "auto":
        return recipe
    most = _most(gpus, recipe.workers.cpus, resources)
    most = min(most, min(part.batch_size for part in recipe.parts))
    most -= most % recipe.parallel.group_size
    workers = recipe.workers.model_copy(update={"max": max(recipe.workers.min, most)})
    counted = recipe.model_copy(update={"workers": workers})
    if problems := [line for _, line in cross_field_problems(counted)]:
        raise UserError(*(f"{line} (workers.max: auto is {workers.max} here)" for line in problems))
    return counted


def _most(gpus: float, cpus: float, resources: Mapping[str, float]) -> int:
    if gpus:
        return int(resources.get("GPU", 0) / gpus + 1e-9)
    return int(resources.get("CPU", 0) / max(CPUS_OF_A_WORKER, cpus) + 1e-9)
