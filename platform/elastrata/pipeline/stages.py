"""A model divided into stages of about equal cost, each parallelized by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.mesh import data_axes
from elastrata.parallel.parallelize import ParallelConfig, Precision, parallelize
from elastrata.step.forward_backward import weighted_loss
from elastrata.workload.batch import Batch
from elastrata.workload.workload import Loss, PipelineParallel, TensorParallel, Workload


def stage_spans(
    costs: Sequence[int], num_stages: int, speeds: Sequence[float] | None = None
) -> list[range]:
    """Return the blocks of each stage in order; every stage gets at least one.

    The slowest stage, which sets the pace of a pipeline, is as fast as possible. Among all such
    divisions, the result has the least sum of squared stage times.

    Args:
        costs: cost of every block.
        num_stages: number of stages.
        speeds: speeds of the ranks, which have the stages in turn; default: all are equally fast.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} blocks for {num_stages} stages")
    # Prefix sums: the cost of a span of blocks is a difference of two.
    sums = [0, *accumulate(costs)]

    def seconds(begin: int, end: int, stage: int) -> float:
        cost = sums[end] - sums[begin]
        return cost / speeds[stage % len(speeds)] if speeds else cost

    @cache
    def slowest_seconds(blocks: int, stages: int) -> float:
        """Return the least possible time of the slowest of `stages` stages with the first
        blocks."""
        if stages == 1:
            return seconds(0, blocks, 0)
        return min(
            max(slowest_seconds(split, stages - 1), seconds(split, blocks, stages - 1))
            for split in range(stages - 1, blocks)
        )

    # Dynamic programming, twice: first the pace, then the most even division at that pace.
    limit = slowest_seconds(len(costs), num_stages)

    @cache
    def least_squares(blocks: int, stages: int) -> tuple[float, int]:
        """Return the least sum of squares within `limit`, and the first block of the last stage."""
        best = (float("inf"), 0)
        for split in range(stages - 1, blocks) if stages > 1 else [0]:
            span_seconds = seconds(split, blocks, stages - 1)
            if span_seconds <= limit:
                before = least_squares(split, stages - 1)[0] if stages > 1 else 0.0
                best = min(best, (before + float(span_seconds) ** 2, split))
        return best

    spans, end = [], len(costs)
    for stages in range(num_stages, 0, -1):
        begin = least_squares(end, stages)[1]
        spans.append(range(begin, end))
        end = begin
    return spans[::-1]


class Stage(nn.Module):
    """One stage of a pipeline; the last one also computes the loss."""

    def __init__(self, part: nn.Module, workload: Workload, *, is_last: bool) -> None:
        super().__init__()
        self.part = part
        self.losses: list[Loss] = []
        """Detached losses of the micro-batches that have passed the last stage."""
        self.weights: dict[str, float] = {}
        """Weight of the global batch by loss term; must be set before the first micro-batch."""
        self._workload = workload
        self._is_last = is_last

    def forward(self, hidden: Tensor | None = None, *, batch: Batch) -> Tensor:
        """Return the input of the next stage, or, from the last one, the micro-batch's share in
        the loss."""
        # `Workload.loss` calls the model with a batch only, so `hidden` must be bound to it.
        part: Any = self.part if hidden is None else partial(self.part, hidden=hidden)
        if not self._is_last:
            return cast(Tensor, part(batch))
        loss = self._workload.loss(part, batch)
        self.losses.append(loss.detached())
        return weighted_loss(loss, self.weights)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """A rank's part of a model that is divided into stages."""

    model: nn.Module
    """All blocks of this rank, under their names in the whole model, for the optimizer and
    checkpoints. It is never called."""
    stages: dict[int, Stage]
    """This rank's stages by number."""
    costs: tuple[float, ...]
    """Cost of a forward pass through each of all stages, divided by the speed of its rank."""
    shared: tuple[str, ...]
    """Names of the parameters that the first and the last stage both have: a tied embedding."""


def own_spans(costs: Sequence[int], mesh: DeviceMesh, parallel: ParallelConfig) -> dict[int, range]:
    """Return the blocks of each of this rank's stages, by stage number.

    Stage s is at place s mod `pipeline` of the axis `pipeline`.
    """
    spans = stage_spans(costs, parallel.num_stages, parallel.stage_speeds)
    numbers = range(mesh.get_local_rank("pipeline"), len(spans), parallel.pipeline)
    return {number: spans[number] for number in numbers}


def split_into_stages(
    model: nn.Module,
    workload: PipelineParallel,
    costs: Sequence[int],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    activation_checkpointing: Recomputation,
    compile: bool,
    parallel: ParallelConfig,
) -> Stages:
    """Divide a model into stages and return those of this rank.

    The blocks' matrices are first divided over the axis `tensor`. Then the blocks are divided into
    stages of about equal cost, and `parallelize` treats each stage like a whole model.
    """
    if parallel.tensor > 1:
        # The whole model at once, before it is divided: stages share the modules.
        assert isinstance(workload, TensorParallel)
        workload.tensor_parallel(model, mesh["tensor"], parallel.sequence)
    spans = stage_spans(costs, parallel.num_stages, parallel.stage_speeds)
    spans_by_stage = own_spans(costs, mesh, parallel)
    stages = {
        number: Stage(workload.stage(model, span), workload, is_last=number == len(spans) - 1)
        for number, span in spans_by_stage.items()
    }
    for stage in stages.values():
        parallelize(
            stage,
            workload.blocks(stage.part),
            # Without the axis `tensor`, which has been applied above.
            data_axes(mesh),
            precision=precision,
            activation_checkpointing=activation_checkpointing,
            compile=compile,
            parallel=parallel,
        )
    # A tied embedding is in the first and the last stage under the same name.
    first, last = (dict(workload.stage(model, spans[n]).named_parameters()) for n in (0, -1))
    return Stages(
        # Also with several stages per rank, whose blocks are not consecutive.
        model=workload.stage(model, [block for span in spans_by_stage.values() for block in span]),
        stages=stages,
        costs=_stage_costs(spans, costs, parallel.stage_speeds or (1.0,)),
        shared=tuple(sorted(first.keys() & last.keys())),
    )


def _stage_costs(
    spans: Sequence[range], costs: Sequence[int], speeds: Sequence[float]
) -> tuple[float, ...]:
    return tuple(
        sum(costs[block] for block in span) / speeds[number % len(speeds)]
        for number, span in enumerate(spans)
    )
