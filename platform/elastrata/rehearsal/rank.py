"""Rehearsal of one rank of many: its samples, its step, its peak memory, and its graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from elastrata.bench.samples import random_rows
from elastrata.checkpoints.staging import Stager
from elastrata.checkpoints.state import training_state
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import DataRank, data_rank
from elastrata.parallel.sharding import local
from elastrata.planner.choice import group_layout
from elastrata.planner.cluster import Cluster
from elastrata.planner.memory import memory
from elastrata.planner.plan import build_machine
from elastrata.recipe.data_sets import DataSpec
from elastrata.recipe.recipe import Recipe
from elastrata.rehearsal.cuda import FakeDevice
from elastrata.rehearsal.ledger import (
    BuildFigures,
    GraphFigures,
    Ledger,
    RankFigures,
    SavingFigures,
)
from elastrata.rehearsal.session import rehearsal
from elastrata.sparsity.masks import Masks
from elastrata.step.train_step import total_weights
from elastrata.trainer import build_model as engine
from elastrata.trainer.build_model import DividedModel, build_divided_model, build_weight_average
from elastrata.trainer.trainer import Loop, build_loop
from elastrata.workload.workload import PlannableWorkload
from elastrata_pipelines.batches import Start
from elastrata_pipelines.deal import Ints, deal
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.virtual_ranks import deal_to_virtual


def rank_steps(
    recipe: Recipe, tokens: int, spec: DataSpec, rank: DataRank, lengths: Sequence[Ints]
) -> Iterator[RankStep]:
    """Yield a rank's part of some steps with random tokens, as the deal assigns them."""
    rng = np.random.default_rng(recipe.seed)
    parallel = recipe.parallel
    virtual = parallel.virtual_ranks
    for number, batch in enumerate(lengths):
        common: dict[str, Any] = {
            "num_ranks": rank.dp_size,
            "work": recipe.workload.work(spec.vocabulary),
            "tokens_per_micro_batch": tokens,
            "multiple": parallel.micro_batch_multiple,
        }
        dealt = (
            deal_to_virtual(batch, virtual_ranks=virtual, **common)
            if virtual
            else deal(batch, **common)
        )
        hand = dealt.hands[rank.rank]
        yield RankStep(
            step=number + 1,
            rows=random_rows(
                batch[hand.rows],
                hand.rows,
                num_ids=spec.vocabulary.size,
                pairs=spec.pairs,
                rng=rng,
            ),
            cuts=hand.cuts,
            imbalance=dealt.imbalance,
            rounds=dealt.rounds,
        )


def shorten_step(step: RankStep, micro_batches: int) -> RankStep:
    """Return a step with its first micro-batches only, or unchanged if it has several rounds."""
    if step.rounds > 1 or micro_batches >= len(step.micro_batches):
        return step
    cuts = step.cuts[: micro_batches + 1]
    rows, _ = step.rows.split(np.array([0, cuts[-1], len(step.rows)]))
    return replace(step, rows=rows, cuts=cuts)


def full_lengths(recipe: Recipe, spec: DataSpec, steps: int) -> list[Ints]:
    """Return the sample lengths of batches whose samples all have the full length."""
    return [np.full(recipe.batch_size, spec.seq_len, dtype=np.int64)] * steps


def varying_lengths(recipe: Recipe, spec: DataSpec, steps: int) -> list[Ints]:
    """Return random sample lengths, between an eighth of the full length and all of it."""
    rng = np.random.default_rng(recipe.seed)
    least = max(4, spec.seq_len // 8)
    return [
        rng.integers(least, spec.seq_len + 1, size=recipe.batch_size, dtype=np.int64)
        for _ in range(steps)
    ]


_TOTAL = "Total"


class PeakMemory(MemTracker):  # type: ignore[no-untyped-call]
    """Peak of a rank's memory on its device."""

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by MemTracker's kinds: parameters, gradients, activations, temporaries
        of the backward pass, optimizer states..."""
        return {kind: size for kind, size in self._at_peak().items() if size and kind != _TOTAL}

    @property
    def bytes(self) -> int:
        """Bytes at the peak."""
        return self._at_peak().get(_TOTAL, 0)

    def _at_peak(self) -> dict[str, int]:
        peaks: Mapping[Any, Mapping[Any, int]] = self.get_tracker_snapshot("peak")
        sizes = next((sizes for device, sizes in peaks.items() if device.type == "cuda"), {})
        return {str(getattr(kind, "value", kind)): int(size) for kind, size in sizes.items()}

    # MemTracker also keeps the peak of every module, looks at each module after every operator, and
    # refuses a second forward pass of a module outside of another one.
    @override
    def _update_peak_stats(self, peak_state: Any) -> None:
        for device, sizes in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < sizes[_TOTAL]:
                self._peak_mem[device] = sizes[_TOTAL]
                self._peak_mem_snap[device] = dict(sizes)

    @override
    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        # Without this, the base class refuses the module's second forward pass.
        if module in self.memory_tracking and not self._mod_tracker.is_bw:
            del self.memory_tracking[module]
        super()._pre_fw_hook(module, inputs)


@contextmanager
def track_memory(*trained: nn.Module) -> Iterator[PeakMemory]:
    """Track memory while the block lasts, starting with these modules' parameters and buffers."""
    peak = PeakMemory()
    peak.track_external(*trained)
    # The tracker would follow modules through the backward pass with hooks that fail on the split
    # backward passes of zero bubble.
    with patch.object(mod_tracker, "register_multi_grad_hook", lambda *_, **__: None), peak:
        yield peak


_TERMS = ("parameters", "gathered", "gradients", "activations", "working")
"""Terms of the plan for tensors in a step."""
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A rehearsal's recipe, data and device."""

    recipe: Recipe
    """A recipe without phases and without `auto` keys."""
    spec: DataSpec
    cluster: Cluster
    device: FakeDevice

    @property
    def world_size(self) -> int:
        """Number of ranks, one for each device."""
        return self.cluster.devices

    @property
    def tokens(self) -> int:
        """Largest number of tokens of a micro-batch."""
        assert isinstance(self.recipe.micro_batch_tokens, int)
        return self.recipe.micro_batch_tokens

    def data_rank(self, rank: int) -> DataRank:
        """Return the place of a rank among the data ranks."""
        parallel = self.recipe.parallel
        return data_rank(rank, self.world_size, parallel.tensor, parallel.pipeline)


def rehearse_rank(task: Task, rank: int) -> RankFigures:
    """Return the figures of one rank's second step."""
    began = time.perf_counter()
    # Uncompiled: compiled graphs would need a compiler for the device.
    recipe = task.recipe.model_copy(update={"compile": False})
    place = task.data_rank(rank)
    lengths = full_lengths(recipe, task.spec, 3)
    first, *others = rank_steps(recipe, task.tokens, task.spec, place, lengths)
    # The first step creates the optimizer's states, for which few micro-batches suffice.
    steps = [shorten_step(first, recipe.parallel.micro_batch_multiple), *others]
    with rehearsal(task.device, world_size=task.world_size, rank=rank) as ledger:
        divided = build_divided_model(
            recipe, task.spec.vocabulary, task.spec.seq_len, DEVICE, task.world_size
        )
        build = BuildFigures(peak_bytes=ledger.peak_bytes, bytes=ledger.live_bytes)
        # Drops the entries of the build.
        ledger.take()
        step = _steps(task, recipe, divided, place, steps, ledger)
        parameters = sum(parameter.numel() for parameter in divided.model.parameters())
        return RankFigures(
            rank=rank,
            parameters=parameters,
            build=build,
            groups=ledger.group_figures(),
            micro_batches=len(steps[-1].micro_batches),
            micro_batch_tokens=max(len(rows.tokens) for rows in steps[-1].micro_batches),
            formula_flops=_formula_flops(task, steps[-1]),
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
    """Return the figures of the second of these steps, while the third is prepared, and of a copy
    of the state after it."""
    optimizer, masks, loop = _build_training(task, recipe, divided, is_primary=place.is_primary)
    with track_memory(divided.model) as peak:
        average = build_weight_average(recipe, divided.model)
        run = loop.run(divided.forward_backward, optimizer, steps, Start())
        # The first step is dropped: it also creates the optimizer's state.
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
        "messages": entries.messages,
        "copies": entries.copies,
        "waits": entries.waits,
        "flops": entries.flops,
        "saving": _saving(state, ledger),
    }


def _build_training(
    task: Task, recipe: Recipe, divided: DividedModel, *, is_primary: bool
) -> tuple[Optimizer, Masks | None, Loop]:
    blocks = recipe.workload.blocks(divided.model)
    masks = engine.build_masks(recipe, divided)
    loop = build_loop(
        recipe,
        divided.clip,
        task.spec.vocabulary,
        DEVICE,
        task.world_size,
        is_primary=is_primary,
        masks=masks,
    )
    return build_optimizer(recipe.optimizer, divided.model, blocks), masks, loop


def _saving(state: dict[str, Any], ledger: Ledger) -> SavingFigures:
    """Return the figures of a copy into main memory."""
    stager = Stager()
    # Twice, because the first copy also allocates its memory.
    for step in range(2):
        ledger.take()
        copy = stager.stage(state, step)
        copy.release()
    entries = ledger.take()
    tensors = [local(leaf) for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return SavingFigures(
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        tensors=len(tensors),
        copies=entries.copies,
        waits=entries.waits,
    )


def _formula_flops(task: Task, step: RankStep) -> float:
    """Return the FLOPs of a rank's share of its samples."""
    workload, vocabulary = task.recipe.workload, task.spec.vocabulary
    batches = [workload.collate(rows, vocabulary, task.recipe.seed) for rows in step.micro_batches]
    lengths = step.rows.segment_lengths.tolist()
    flops = workload.flops(lengths, total_weights(batches), vocabulary)
    return flops / task.recipe.parallel.group_size


def _planned(task: Task, step: RankStep) -> dict[str, Any]:
    """Return the plan's figures for exactly these micro-batches."""
    recipe, spec = task.recipe, task.spec
    if not isinstance(recipe.workload, PlannableWorkload):
        return {"planned_bytes": None, "planned": None}
    layout = group_layout(recipe.parallel, task.world_size)
    tokens = max(len(rows.tokens) for rows in step.micro_batches)
    assert recipe.activation_checkpointing != "auto"
    need = memory(
        # A packed micro-batch counts as one sample of all its tokens.
        replace(recipe.workload.model_spec(spec.vocabulary, spec.seq_len), seq_len=tokens),
        task.cluster.device,
        build_machine(recipe, task.cluster).stack,
        replace(layout, micro_batch=1, checkpointing=recipe.activation_checkpointing),
        len(step.micro_batches) * layout.data,
    )
    terms = {name: getattr(need, name) for name in _TERMS}
    return {"planned_bytes": sum(terms.values()), "planned": terms}


_STEPS = 3


def rehearse_graphs(task: Task, rank: int) -> GraphFigures:
    """Return the graphs, breaks and recompilations over some steps of varying lengths, and the
    graphs of the first step in a later group of workers in the same process, as after a fault."""
    place, lengths = task.data_rank(rank), varying_lengths(task.recipe, task.spec, _STEPS)
    # Graphs belong to blocks, so their number does not depend on the number of micro-batches.
    fewest = max(2, task.recipe.parallel.micro_batch_multiple)
    steps = [
        shorten_step(step, fewest)
        for step in rank_steps(task.recipe, task.tokens, task.spec, place, lengths)
    ]
    with _count_graphs() as graphs, rehearsal(task.device, world_size=task.world_size, rank=rank):
        after = [len(graphs) for _ in _run_in_new_group(task, place.is_primary, steps)]
        breaks = dict(counters["graph_break"])
        for _ in _run_in_new_group(task, place.is_primary, steps[:1]):
            pass
    return GraphFigures(
        steps=len(after),
        graphs=after[-1],
        breaks=sum(breaks.values()),
        reasons=[reason.splitlines()[0] for reason in breaks],
        recompilations=after[-1] - after[0],
        next_group=len(graphs) - after[-1],
    )


def _run_in_new_group(task: Task, is_primary: bool, steps: Sequence[RankStep]) -> Iterator[object]:
    """Build the model as in a new group of workers; return an iterator that trains the steps."""
    recipe, spec = task.recipe, task.spec
    divided = build_divided_model(
        recipe, spec.vocabulary, spec.seq_len, DEVICE, task.world_size, draws=False
    )
    optimizer, _, loop = _build_training(task, recipe, divided, is_primary=is_primary)
    return loop.run(divided.forward_backward, optimizer, steps, Start())


@contextmanager
def _count_graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """Yield the list of graphs that are compiled in the block; they run uncompiled."""
    graphs, compiled = list[torch.fx.GraphModule](), torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compile(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **{**kwargs, "backend": backend})

    # Dynamo's counters are global to the process.
    counters.clear()
    with (
        patch.object(torch, "compile", compile),
        torch._dynamo.config.patch(specialize_float=True),
    ):
        yield graphs
