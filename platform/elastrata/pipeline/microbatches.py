"""Micro-batches through the stages of a pipeline, by the schedules of torch.distributed.pipelining.

All ranks of a pipeline have the micro-batches, so that hidden states and their gradients are all
that travels from stage to stage. All micro-batches of a step are filled up to one length: torch
receives into memory of one shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from typing_extensions import override

from elastrata.device.capabilities import peak_memory_bytes
from elastrata.device.device_transfer import Readback
from elastrata.parallel.parallelize import GradientSync, ParallelConfig
from elastrata.parallel.parallelize import Schedule as Name
from elastrata.parallel.sharding import local
from elastrata.pipeline.stages import Stages
from elastrata.step.forward_backward import ForwardBackward
from elastrata.workload.batch import Batch
from elastrata.workload.workload import Loss, Metric, PipelineParallel

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward whole, or in two parts: gradients of the inputs, then of the weights."""
Action = tuple[int, Kind, int]
"""Stage, kind, micro-batch."""
_PARTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
_CALLED: Mapping[Kind, Kind] = {"B": "I"}
"""The stage before waits for the gradient of the inputs alone."""


def bubble(
    order: Mapping[int, Sequence[Action]], costs: Sequence[float], *, recomputed: float
) -> float:
    """1 - (seconds all ranks compute) / (ranks * seconds until the last one has finished).

    A rank does one thing after the other, each as soon as what it needs is there. A forward pass
    takes the cost of its stage, either part of a backward pass as much again, besides what is
    recomputed in it. Messages take no time. Stages of equal costs c make it
    (p - 1) / (m + p - 1) with GPipe and 1F1B on p ranks with m micro-batches, and
    (p - 1) / (v m + p - 1) interleaved with v stages on a rank (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2, over the whole step).

    Raises:
        ValueError: no rank can go on, as each waits for what never comes.
    """
    left = {rank: list(actions) for rank, actions in order.items()}
    free = dict.fromkeys(order, 0.0)
    ended: dict[Action, float] = {}
    busy = 0.0
    while any(left.values()):
        waiting = [rank for rank, actions in left.items() if actions]
        ready = [r for r in waiting if _needed(left[r][0], len(costs)) <= ended.keys()]
        if not ready:
            raise ValueError("a schedule in which every rank waits")
        for rank in ready:
            stage, kind, batch = action = left[rank].pop(0)
            seconds = costs[stage] * (_PARTS[kind] + (recomputed if kind in "BI" else 0.0))
            needed = (ended[other] for other in _needed(action, len(costs)))
            free[rank] = max(free[rank], *needed, 0.0) + seconds
            ended[stage, _CALLED.get(kind, kind), batch] = free[rank]
            busy += seconds
    return 1 - busy / (len(order) * max(free.values()))


def one_stage_order(
    num_ranks: int, num_micro_batches: int, *, interleaves: bool
) -> dict[int, list[Action]]:
    """The order of ranks with one stage each: GPipe, or 1F1B, in which rank r has at most
    `num_ranks` - r micro-batches under way.

    torch's own plan of 1F1B (`Schedule1F1B.pipeline_order` of torch 2.13) counts the micro-batches
    of its last rank from 1.
    """
    order: dict[int, list[Action]] = {}
    for rank in range(num_ranks):
        most = num_ranks - rank if interleaves else num_micro_batches
        order[rank] = []
        for batch in range(num_micro_batches + most):
            if batch >= most and batch - most < num_micro_batches:
                order[rank].append((rank, "B", batch - most))
            if batch < num_micro_batches:
                order[rank].append((rank, "F", batch))
    return order


def computations(order: Mapping[int, Sequence[Any]]) -> dict[int, list[Action]]:
    """What every rank computes in torch's plan (`pipeline_order`), without messages and waits."""
    return {
        rank: [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in actions
            if action is not None and action.is_compute_op
        ]
        for rank, actions in order.items()
    }


def _needed(action: Action, num_stages: int) -> set[Action]:
    """The actions that must have ended before."""
    stage, kind, batch = action
    if kind == "F":
        return {(stage - 1, "F", batch)} if stage else set()
    if kind == "W":
        return {(stage, "I", batch)}
    later: set[Action] = {(stage + 1, "I", batch)} if stage + 1 < num_stages else set()
    return {(stage, "F", batch), *later}


class Agreement:
    """That all stages know the shapes they will receive, asked once for all schedules.

    torch asks for every new one, that is for every new length of micro-batches, stage after stage,
    and has the host wait twice for the device: to ask, and to read the answer. The first time is
    not spared: it also connects neighbouring ranks.
    """

    def __init__(self) -> None:
        self._mode: Any = None

    def spares(self, schedule: Any) -> None:
        """Has a new schedule take over what an earlier one has agreed on."""
        if self._mode is not None:
            schedule._warmup_p2p = self._taken_over

    def holds(self, stages: Sequence[PipelineStage]) -> None:
        """These stages have agreed; in versions of torch that ask for nothing, on nothing."""
        self._mode = getattr(stages[0], "_inference_mode", None)

    def _taken_over(self, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = self._mode


@dataclass(frozen=True)
class LossNames:
    """The names in a loss, the same in every step."""

    terms: tuple[str, ...]
    metrics: tuple[tuple[str, str], ...]
    """Each with the loss term by whose weight it is divided."""

    @classmethod
    def of(cls, loss: Loss) -> LossNames:
        """Those of a loss."""
        metrics = tuple((name, metric.per) for name, metric in loss.metrics.items())
        return cls(tuple(loss.terms), metrics)

    def __len__(self) -> int:
        return len(self.terms) + len(self.metrics)

    def numbers(self, loss: Loss) -> list[Tensor]:
        """The sums in such a loss: terms, then metrics."""
        metrics = [loss.metrics[name].total for name, _ in self.metrics]
        return [*(loss.terms[term] for term in self.terms), *metrics]

    def loss(self, numbers: Tensor) -> Loss:
        """The loss with these sums, in that order; shape [n]."""
        terms, metrics = numbers[: len(self.terms)], numbers[len(self.terms) :]
        return Loss(
            dict(zip(self.terms, terms, strict=True)),
            {
                name: Metric(total, per)
                for (name, per), total in zip(self.metrics, metrics, strict=True)
            },
        )


SCHEDULES: Mapping[Name, type[Any]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
FILLED_TO = 64
"""Micro-batches have a multiple of so many positions: every new length is agreed on between the
ranks of a pipeline, stage after stage."""
EVALUATED_AT_ONCE = 4
"""Times the number of ranks: so many micro-batches are evaluated at once, as torch keeps memory for
the hidden states of each of them."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A schedule for one number and length of micro-batches."""

    schedule: Any
    stages: list[PipelineStage]
    bubble: float


class Pipeline(ForwardBackward):
    """This rank's part of a pipeline."""

    def __init__(
        self,
        stages: Stages,
        workload: PipelineParallel,
        mesh: DeviceMesh,
        parallel: ParallelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recomputed: float,
    ) -> None:
        self._stages, self._workload, self._parallel = stages, workload, parallel
        self._dtype, self._device, self._recomputed = dtype, device, recomputed
        self._group = mesh.get_group("pipeline")
        self._stage_rank = mesh.get_local_rank("pipeline")
        self._agreement = Agreement()
        self._runs: dict[bool, tuple[tuple[int, ...], _Run]] = {}
        self._names: LossNames | None = None
        self._memory: Readback | None = None
        self._bubble = 0.0

    @override
    def ready(self, batches: Sequence[Batch]) -> list[Batch]:
        """Fills micro-batches up to one length."""
        multiple = math.lcm(FILLED_TO, self._parallel.tensor)
        return self._workload.equally_long(batches, multiple)

    @override
    def train(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, rounds: int
    ) -> list[Loss]:
        """All ranks of a pipeline return the same; `rounds` must be 1."""
        assert rounds == 1
        loss = self._through(batches, weights, trains=True)
        self._add_up_shared()
        return [loss]

    @override
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Loss]:
        """All ranks of a pipeline return the same."""
        at_once = EVALUATED_AT_ONCE * self._parallel.micro_batch_multiple
        weights = dict.fromkeys(batches[0].weights, 1.0)
        self._stages.model.eval()
        losses = [
            self._through(batches[first : first + at_once], weights, trains=False)
            for first in range(0, len(batches), at_once)
        ]
        self._stages.model.train()
        self._runs.pop(False)
        return losses

    @override
    def recomputes(self, share: float) -> None:
        """Changes the figures only: it is the stages' blocks that recompute."""
        self._recomputed = share
        self._runs.clear()

    @override
    def figures(self) -> Mapping[str, Any]:
        memory = self._memory.read() if self._memory else ()  # the step's numbers came after it
        return {"bubble": self._bubble, "memory_by_stage": tuple(map(int, memory))}

    @override
    def synchronizes(self, when: GradientSync) -> None:
        """Once a step, as the schedule does."""
        assert when == "step"

    def _through(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, trains: bool
    ) -> Loss:
        """Runs the schedule; the sum of the losses, on every rank of the pipeline."""
        count, run = len(batches), self._run(batches, trains=trains)
        for stage in self._stages.stages.values():
            stage.weights, stage.losses = dict(weights), []
        for part in run.stages:
            part.has_backward = trains
            part.clear_runtime_states()
        # `step` would cut up tensors; these are micro-batches already.
        run.schedule._step_microbatches(
            [()] * count,
            [{"batch": batch} for batch in batches],
            [None] * count,
            return_outputs=False,
        )
        self._agreement.holds(run.stages)
        return self._told_by_the_last(weights)

    def _run(self, batches: Sequence[Batch], *, trains: bool) -> _Run:
        whole = self._workload.hidden_shape(batches[0])
        parts = self._parallel.tensor if self._parallel.sequence else 1
        shape = (whole[0] // parts, *whole[1:])
        key = (len(batches), *shape)
        if trains not in self._runs or self._runs[trains][0] != key:
            self._runs.pop(trains, None)
            self._runs[trains] = key, self._new_run(len(batches), shape, trains=trains)
        run = self._runs[trains][1]
        self._bubble = run.bubble if trains else self._bubble
        return run

    def _new_run(self, num_micro_batches: int, shape: tuple[int, ...], *, trains: bool) -> _Run:
        num_stages = len(self._stages.costs)
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=trains)
        stages = [
            PipelineStage(
                module,
                number,
                num_stages,
                self._device,
                input_args=(hidden,) if number else (),
                output_args=(hidden,),
                group=self._group,
            )
            for number, module in self._stages.stages.items()
        ]
        kind = SCHEDULES[self._parallel.schedule]
        schedule = kind(
            stages[0] if issubclass(kind, PipelineScheduleSingle) else stages,
            num_micro_batches,
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )
        schedule._has_backward = trains
        self._agreement.spares(schedule)
        return _Run(
            schedule=schedule,
            stages=stages,
            bubble=bubble(
                self._order(schedule, num_micro_batches),
                self._stages.costs,
                recomputed=self._recomputed,
            ),
        )

    def _order(self, schedule: Any, num_micro_batches: int) -> Mapping[int, Sequence[Action]]:
        if self._parallel.schedule in ("gpipe", "1f1b"):
            warm_up = self._parallel.schedule == "1f1b"
            return one_stage_order(self._group.size(), num_micro_batches, interleaves=warm_up)
        return computations(schedule.pipeline_order)

    def _told_by_the_last(self, weights: Mapping[str, float]) -> Loss:
        """The sum of the losses that the last stage has; the ranks tell their memory, too. Read by
        nobody here: numbers stay on the device."""
        last = self._stages.stages.get(len(self._stages.costs) - 1)
        loss = _summed(last.losses) if last else None
        names = self._loss_names(loss, weights)
        told = torch.full(
            (1 + len(names),), float(peak_memory_bytes(self._device)), **_like(self._device)
        )
        if loss:
            told[1:] = torch.stack(names.numbers(loss))
        heard = [torch.empty_like(told) for _ in range(self._group.size())]
        dist.all_gather(heard, told, group=self._group)
        self._memory = Readback(torch.stack([numbers[0] for numbers in heard]))
        return names.loss(heard[-1][1:])

    def _loss_names(self, loss: Loss | None, weights: Mapping[str, float]) -> LossNames:
        """What the numbers of a loss are called, which the last stage tells once: they are the same
        in every step."""
        if self._names is None:
            heard: list[LossNames | None] = [None] * self._group.size()
            own = LossNames.of(loss) if loss else None
            dist.all_gather_object(heard, own, group=self._group)
            # In a rehearsal one rank stands for all, and none may have the last stage.
            self._names = heard[-1] or LossNames(tuple(weights), ())
        return self._names

    def _add_up_shared(self) -> None:
        """Adds to the gradients of parameters that the first and the last stage both have those of
        the other one. Both then have the same, to the bit, and so do the parameters ever after."""
        ends = (0, self._group.size() - 1)
        if self._stage_rank not in ends:
            return
        other = ends[self._stage_rank == 0]
        for name in self._stages.shared:
            gradient = self._stages.model.get_parameter(name).grad
            assert gradient is not None
            _add_from(local(gradient), other, self._group)


@torch.no_grad()
def _add_from(values: Tensor, other: int, group: dist.ProcessGroup) -> None:
    """Adds the other rank's values in place, while it adds these. Collective between the two."""
    if not values.numel():
        return
    received = torch.empty_like(values)
    messages = [
        dist.P2POp(dist.isend, values, group=group, group_peer=other),
        dist.P2POp(dist.irecv, received, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    values.add_(received)


def _like(device: torch.device) -> dict[str, Any]:
    return {"dtype": torch.float64, "device": device}


def _summed(losses: Sequence[Loss]) -> Loss:
    """In float64."""

    def total(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value.double() for value in values]).sum()

    return Loss(
        {term: total([loss.terms[term] for loss in losses]) for term in losses[0].terms},
        {
            name: Metric(total([loss.metrics[name].total for loss in losses]), metric.per)
            for name, metric in losses[0].metrics.items()
        },
    )
