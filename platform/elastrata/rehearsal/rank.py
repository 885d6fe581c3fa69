"""One rank of a recipe's run, rehearsed: the engine's own model, step and copy of the state."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastrata.checkpoints.staging import Stager
from elastrata.checkpoints.training_state import training_state
from elastrata.core.control_signal import Action
from elastrata.core.mesh import DataRank, data_rank
from elastrata.core.optimizer import build_optimizer
from elastrata.core.sharding import local
from elastrata.core.step import total_weights
from elastrata.core.workload import Planned
from elastrata.planner.choice import group_layout
from elastrata.planner.cluster import Cluster
from elastrata.planner.memory import memory
from elastrata.planner.plan import machine_of
from elastrata.recipe.data_spec import DataSpec
from elastrata.recipe.recipe import Recipe
from elastrata.rehearsal.cuda import FakeDevice
from elastrata.rehearsal.figures import (
    BuildFigures,
    RankFigures,
    SavingFigures,
    copies,
    groups,
    messages,
    waits,
)
from elastrata.rehearsal.ledger import Ledger
from elastrata.rehearsal.memory import track
from elastrata.rehearsal.samples import full, rank_steps, shortened
from elastrata.rehearsal.session import rehearsal
from elastrata.trainer.engine import (
    DividedModel,
    divided_model,
    phase_masks,
    training_loop,
    weight_average,
)
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep

_TERMS = ("parameters", "gathered", "gradients", "activations", "working")
"""Terms of the plan for what tensors have in a step."""
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is rehearsed."""

    recipe: Recipe
    """Without phases, and with nothing left open."""
    spec: DataSpec
    cluster: Cluster
    device: FakeDevice

    @property
    def world_size(self) -> int:
        """Ranks, one for each device."""
        return self.cluster.devices

    @property
    def tokens(self) -> int:
        """Of a micro-batch, at most."""
        assert isinstance(self.recipe.micro_batch_tokens, int)
        return self.recipe.micro_batch_tokens

    def data_rank(self, rank: int) -> DataRank:
        """The place of a rank among those that have different samples."""
        parallel = self.recipe.parallel
        return data_rank(rank, self.world_size, parallel.tensor, parallel.pipeline)


def rehearse_rank(task: Task, rank: int) -> RankFigures:
    """The figures of one rank's second step.

    Without compilation: its graphs would need a compiler for the device.
    """
    began = time.perf_counter()
    recipe = task.recipe.model_copy(update={"compile": False})
    place = task.data_rank(rank)
    lengths = full(recipe, task.spec, 3)
    first, *others = rank_steps(recipe, task.tokens, task.spec, place, lengths)
    # The first one makes the optimizer's states, for which few micro-batches will do.
    steps = [shortened(first, recipe.parallel.micro_batch_multiple), *others]
    with rehearsal(task.device, world_size=task.world_size, rank=rank) as ledger:
        divided = divided_model(
            recipe, task.spec.vocabulary, task.spec.seq_len, DEVICE, task.world_size
        )
        build = BuildFigures(peak_bytes=ledger.peak_bytes, bytes=ledger.live_bytes)
        ledger.take()
        step = _steps(task, recipe, divided, place, steps, ledger)
        parameters = sum(parameter.numel() for parameter in divided.model.parameters())
        return RankFigures(
            rank=rank,
            parameters=parameters,
            build=build,
            groups=groups(ledger),
            micro_batches=len(steps[-1].micro_batches),
            micro_batch_tokens=max(len(rows.tokens) for rows in steps[-1].micro_batches),
            formula_flops=_formula(task, steps[-1]),
            **_planned(task, steps[-1]),
            **step,
            seconds=time.perf_counter() - began,
        )


def _steps(
    task: Task,
    recipe: Recipe,
    divided: DividedModel,
    place: DataRank,
    steps: list[RankStep],
    ledger: Ledger,
) -> dict[str, Any]:
    """The figures of the second of these steps, in which the third one is made ready, and of a copy
    of the state after it."""
    optimizer = build_optimizer(
        recipe.optimizer, divided.model, recipe.workload.blocks(divided.model)
    )
    masks = phase_masks(recipe, divided)
    loop = training_loop(
        recipe,
        divided.clip,
        task.spec.vocabulary,
        DEVICE,
        task.world_size,
        is_primary=place.is_primary,
        masks=masks,
    )
    with track(divided.model) as peak:
        average = weight_average(recipe, divided.model)
        run = loop.run(divided.forward_backward, optimizer, steps, Start(), lambda: Action.GO_ON)
        for _ in range(2):
            ledger.take()
            record, _ = next(run)
            if average:
                average.stepped(record.step)
        entries = ledger.take()
        run.close()
    kept = [part.state() for part in (masks, average) if part]
    state = reduce(or_, kept, training_state(divided.model, optimizer))
    return {
        "peak_bytes": peak.bytes,
        "memory": peak.by_kind,
        "messages": messages(entries),
        "copies": copies(entries),
        "waits": waits(entries),
        "flops": entries.flops,
        "saving": _saving(state, ledger),
    }


def _saving(state: dict[str, Any], ledger: Ledger) -> SavingFigures:
    """A copy into main memory, in pages that an earlier one has made."""
    stager = Stager()
    for step in range(2):
        ledger.take()
        copy = stager.stage(state, step)
        copy.release()
    entries = ledger.take()
    tensors = [local(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return SavingFigures(
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        tensors=len(tensors),
        copies=copies(entries),
        waits=waits(entries),
    )


def _formula(task: Task, step: RankStep) -> float:
    """FLOPs of a rank's share of its samples."""
    workload, vocabulary = task.recipe.workload, task.spec.vocabulary
    batches = [workload.collate(rows, vocabulary, task.recipe.seed) for rows in step.micro_batches]
    lengths = step.rows.segment_lengths.tolist()
    flops = workload.flops(lengths, total_weights(batches), vocabulary)
    return flops / task.recipe.parallel.group_size


def _planned(task: Task, step: RankStep) -> dict[str, Any]:
    """The plan of these very micro-batches."""
    recipe, spec = task.recipe, task.spec
    if not isinstance(recipe.workload, Planned):
        return {"planned_bytes": None, "planned": None}
    layout = group_layout(recipe.parallel, task.world_size)
    tokens = max(len(rows.tokens) for rows in step.micro_batches)
    assert recipe.activation_checkpointing != "auto"
    need = memory(
        replace(recipe.workload.model_spec(spec.vocabulary, spec.seq_len), seq_len=tokens),
        task.cluster.device,
        machine_of(recipe, task.cluster).stack,
        replace(layout, micro_batch=1, checkpointing=recipe.activation_checkpointing),
        len(step.micro_batches) * layout.data,
    )
    terms = {name: getattr(need, name) for name in _TERMS}
    return {"planned_bytes": sum(terms.values()), "planned": terms}
