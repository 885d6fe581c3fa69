"""What a recipe leaves open, as the choices of a group of workers. Knows no Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastrata.core.device import device_name, memory_of_worker
from elastrata.core.parallelize import GradientSync
from elastrata.core.recomputation import Recomputation, way_at_first
from elastrata.core.workload import model_spec
from elastrata.planner.choice import Choices, group_cluster, group_layout, phase_choices
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.auto import Automatic, PhaseChoices
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKind, RankKinds, different


def automatic(
    recipe: Recipe,
    phases: Sequence[Phase],
    recompute: Callable[[Recomputation], None],
    device: torch.device,
    *,
    world_size: int,
    per_node: int,
    synchronize: Callable[[GradientSync], None] = lambda _: None,
    kinds: RankKinds = (),
    data_rank: int = 0,
) -> Automatic:
    """A group's choices, as a recipe leaves them open. Collective.

    Args:
        recipe: that is trained.
        phases: its data.
        recompute: has the model's blocks compute again something else.
        device: of this rank.
        world_size: workers of the group.
        per_node: of them, on this node.
        synchronize: has the model's gradients summed at other times.
        kinds: of the data ranks, by their memory; none: they are of one kind.
        data_rank: of this rank.
    """
    there = different(kinds)
    number = there.index(kinds[data_rank]) if kinds else 0
    open_phases = []
    if recipe.is_automatic:
        name = device_name(device) if device.type == "cuda" else "CPU"
        devices = _by_kind((number, (name, per_node)), world_size)
        open_phases = [
            PhaseChoices(
                last_step=phase.last_step,
                kinds=tuple(
                    _choices(recipe, part, phase, kind, world_size, *devices[n])
                    for n, kind in enumerate(there)
                ),
            )
            for part, phase in zip(recipe.parts, phases, strict=True)
        ]
    return Automatic(
        open_phases,
        way_at_first(recipe.activation_checkpointing),
        recompute,
        device,
        memory_of_worker(device, per_node, recipe.workers.memory_gb),
        synchronize=synchronize,
        names=[kind.name for kind in there],
        kind=number,
    )


def _choices(
    recipe: Recipe,
    part: PhaseKeys,
    phase: Phase,
    kind: RankKind,
    world_size: int,
    device: str,
    per_node: int,
) -> Choices:
    """All that a kind of ranks may choose in a phase."""
    data = phase.batches
    return phase_choices(
        recipe,
        part,
        model_spec(recipe.workload, data.manifest.vocabulary, data.manifest.seq_len),
        _budgets(data, kind),
        group_layout(recipe.parallel, world_size),
        group_cluster(device, world_size, per_node),
    )


def _budgets(data: Batches, kind: RankKind) -> list[int]:
    """The numbers of tokens that a kind's micro-batches may have, ascending."""
    sizes = (data.tokens_per_micro_batch, *data.larger_budgets)
    return [size for size in sizes if kind.budget(size) == size] or [kind.budget(sizes[0])]


def _by_kind(value: tuple[int, Any], world_size: int) -> dict[int, Any]:
    """Of each kind the value of its first rank, on every rank: they may differ from machine to
    machine."""
    values = [value] * world_size
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return dict(reversed(values))
