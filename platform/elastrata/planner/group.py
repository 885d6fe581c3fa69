"""The choices of a recipe's phases on a group of workers that is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.core.parallelize import ParallelConfig, sync_at_first
from elastrata.core.recomputation import Recomputation
from elastrata.planner.choice import USABLE, Choices, budgets
from elastrata.planner.cluster import Cluster
from elastrata.planner.devices import device_like
from elastrata.planner.layout import Layout
from elastrata.planner.plan import machine_of
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe


def group_layout(parallel: ParallelConfig, world_size: int) -> Layout:
    """How a group of workers divides the model: as `rank_mesh` makes it.

    Args:
        parallel: the recipe's.
        world_size: workers of the group, a multiple of `parallel.group_size`.
    """
    data = world_size // parallel.group_size
    copies = data if parallel.replicate == "all" else parallel.replicate
    copies = copies if data % copies == 0 else 1
    return Layout(
        tensor=parallel.tensor,
        sequence=parallel.sequence,
        pipeline=parallel.pipeline,
        virtual_stages=parallel.virtual_stages,
        schedule=parallel.schedule,
        stage_speeds=parallel.stage_speeds or (),
        shards=data // copies,
        copies=copies,
        gradient_sync=sync_at_first(parallel.gradient_sync),
        reshard=parallel.reshard_after_forward,
    )


def group_cluster(device_name: str, world_size: int, per_node: int) -> Cluster:
    """The workers as the plan sees them.

    Args:
        device_name: as PyTorch has it; any CPU's is `CPU`.
        world_size: workers of the group.
        per_node: of them, on one node.
    """
    return Cluster(device=device_like(device_name), devices=world_size, per_node=per_node)


def policies(recipe: Recipe) -> tuple[Recomputation, ...]:
    """The values that `activation_checkpointing: auto` may have; zero bubble divides the backward
    pass, and what `selective` keeps is there for one."""
    if recipe.parallel.pipeline > 1 and recipe.parallel.schedule == "zero_bubble":
        return ("none", "full")
    return ("none", "selective", "full")


def phase_choices(
    recipe: Recipe,
    part: PhaseKeys,
    model: ModelSpec,
    sizes: Sequence[int],
    layout: Layout,
    cluster: Cluster,
) -> Choices:
    """The choices of a group for one phase; a single one where the recipe leaves nothing open.

    Args:
        recipe: that is trained.
        part: its phase.
        model: on samples as long as that phase's.
        sizes: tokens that a micro-batch may have, ascending.
        layout: of the group.
        cluster: the group.
    """
    policy, sync = recipe.activation_checkpointing, recipe.parallel.gradient_sync
    return Choices(
        model=model,
        cluster=cluster,
        machine=machine_of(recipe, cluster),
        layout=layout,
        batch_size=part.batch_size,
        budgets=tuple(sizes),
        policies=policies(recipe) if policy == "auto" else (policy,),
        syncs=("step", "micro_batch") if sync == "auto" else (sync,),
    )


@dataclass(frozen=True, kw_only=True)
class AutomaticPlan:
    """The plan for `auto` on a cluster. The field names are keys of `elastrata plan --json`."""

    layout: str
    """How the recipe has the devices divide the model."""
    micro_batch_tokens: int
    activation_checkpointing: str
    gradient_sync: str
    memory_bytes: float
    fits: bool
    """Whether that is within what a group dares to use of its devices."""


def planned(recipe: Recipe, part: PhaseKeys, model: ModelSpec, cluster: Cluster) -> AutomaticPlan:
    """The choice of a group on all devices of a cluster, if it measured what is planned.

    Args:
        recipe: that leaves something open.
        part: one of its phases.
        model: on samples as long as that phase's.
        cluster: with a multiple of `parallel.group_size` devices.
    """
    layout = group_layout(recipe.parallel, cluster.devices)
    tokens = part.micro_batch_tokens
    choices = phase_choices(
        recipe,
        part,
        model,
        budgets(model.seq_len, part.batch_size) if tokens == "auto" else (tokens,),
        layout,
        cluster,
    )
    usable = USABLE * cluster.device.memory_bytes
    best = choices.best(lambda choice: choices.bytes(choice) <= usable)
    needed = choices.bytes(best)
    return AutomaticPlan(
        layout=layout.division,
        micro_batch_tokens=best.micro_batch_tokens,
        activation_checkpointing=best.activation_checkpointing,
        gradient_sync=best.gradient_sync,
        memory_bytes=needed,
        fits=needed <= usable,
    )
