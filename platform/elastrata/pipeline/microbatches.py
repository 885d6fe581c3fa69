"""Passes of micro-batches through the stages of a pipeline, by torch.distributed.pipelining.

All ranks of a pipeline have the micro-batches, so only hidden states and their gradients are sent
from stage to stage.
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
"""Forward; whole backward; backward in two parts: gradients of the inputs (I), then of the
weights (W)."""
Action = tuple[int, Kind, int]
"""Stage, kind and micro-batch."""
_RELATIVE_COSTS: Mapping[Kind, int] = {"F": 1, "B": 2, "I": 1, "W": 1}
_COMPLETED_AS: Mapping[Kind, Kind] = {"B": "I"}
"""A whole backward pass counts as I, because the previous stage only waits for the gradient of
the inputs."""


def bubble(
    order: Mapping[int, Sequence[Action]], costs: Sequence[float], *, recomputed: float
) -> float:
    """Return 1 - (compute seconds of all ranks) / (ranks * seconds until the last one has
    finished).

    A rank executes its actions in order, each as soon as its inputs are available. A forward pass
    takes the cost of its stage. Each part of a backward pass takes the same, and B and I also take
    the recomputation. Messages take no time. With stages of equal cost, p ranks and m
    micro-batches, the result is (p - 1) / (m + p - 1) for GPipe and 1F1B, and
    (p - 1) / (v m + p - 1) for interleaving with v stages on a rank (Narayanan et al. 2021,
    arXiv 2104.04473, section 2.2, over the whole step).

    Args:
        order: actions of every rank.
        costs: cost of a forward pass by stage.
        recomputed: share of the forward pass that the backward pass recomputes.

    Raises:
        ValueError: the schedule deadlocks.
    """
    remaining = {rank: list(actions) for rank, actions in order.items()}
    seconds_of_rank = dict.fromkeys(order, 0.0)
    end_of_action: dict[Action, float] = {}
    compute_seconds = 0.0
    while any(remaining.values()):
        waiting = [rank for rank, actions in remaining.items() if actions]
        ready = [
            r for r in waiting if _dependencies(remaining[r][0], len(costs)) <= end_of_action.keys()
        ]
        if not ready:
            raise ValueError("a schedule in which every rank waits")
        for rank in ready:
            stage, kind, batch = action = remaining[rank].pop(0)
            seconds = costs[stage] * (_RELATIVE_COSTS[kind] + (recomputed if kind in "BI" else 0.0))
            dependency_ends = (end_of_action[other] for other in _dependencies(action, len(costs)))
            seconds_of_rank[rank] = max(seconds_of_rank[rank], *dependency_ends, 0.0) + seconds
            end_of_action[stage, _COMPLETED_AS.get(kind, kind), batch] = seconds_of_rank[rank]
            compute_seconds += seconds
    return 1 - compute_seconds / (len(order) * max(seconds_of_rank.values()))


def one_stage_order(
    num_ranks: int, num_micro_batches: int, *, interleaves: bool
) -> dict[int, list[Action]]:
    """Return the order of actions on ranks with one stage each, for GPipe or 1F1B (`interleaves`).

    With 1F1B, rank r has at most `num_ranks` - r micro-batches in progress.
    """
    # torch's own plan (`Schedule1F1B.pipeline_order` of torch 2.13) numbers the micro-batches of
    # its last rank from 1, so it is not used.
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
    """Return the computations of every rank in torch's plan (`pipeline_order`), without
    messages."""
    return {
        rank: [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in actions
            if action is not None and action.is_compute_op
        ]
        for rank, actions in order.items()
    }


def _dependencies(action: Action, num_stages: int) -> set[Action]:
    """Return the actions that must end before `action`."""
    stage, kind, batch = action
    if kind == "F":
        return {(stage - 1, "F", batch)} if stage else set()
    if kind == "W":
        return {(stage, "I", batch)}
    next_stage: set[Action] = {(stage + 1, "I", batch)} if stage + 1 < num_stages else set()
    return {(stage, "F", batch), *next_stage}


class Agreement:
    """Lets all schedules share one agreement between stages about the shapes that they receive."""

    def __init__(self) -> None:
        # torch agrees again in every new schedule, that is for every new length of micro-batches,
        # stage after stage, and the host waits for the device twice. The first agreement is still
        # necessary, as it also connects neighbouring ranks.
        self._mode: Any = None

    def spares(self, schedule: Any) -> None:
        """Make a new schedule reuse an earlier agreement."""
        if self._mode is not None:
            schedule._warmup_p2p = self._reuse_mode

    def holds(self, stages: Sequence[PipelineStage]) -> None:
        """Record that these stages have agreed."""
        # Versions of torch without this attribute need no agreement.
        self._mode = getattr(stages[0], "_inference_mode", None)

    def _reuse_mode(self, stages: Sequence[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = self._mode


@dataclass(frozen=True)
class LossNames:
    """Names of the terms and metrics of a loss, equal in every step."""

    terms: tuple[str, ...]
    metrics: tuple[tuple[str, str], ...]
    """Pairs of a metric's name and the loss term by whose weight it is divided."""

    @classmethod
    def of(cls, loss: Loss) -> LossNames:
        """Return the names of a loss."""
        metrics = tuple((name, metric.per) for name, metric in loss.metrics.items())
        return cls(tuple(loss.terms), metrics)

    def __len__(self) -> int:
        return len(self.terms) + len(self.metrics)

    def numbers(self, loss: Loss) -> list[Tensor]:
        """Return the sums of a loss: terms, then metrics."""
        metrics = [loss.metrics[name].total for name, _ in self.metrics]
        return [*(loss.terms[term] for term in self.terms), *metrics]

    def loss(self, numbers: Tensor) -> Loss:
        """Return the loss with these sums, shape [n], in the order of `numbers`."""
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
"""Micro-batches are padded to a multiple of this number of positions, as every new length costs
an agreement of the stages."""
EVALUATED_AT_ONCE = 4
"""Number of micro-batches, per rank of the pipeline, that are evaluated together. torch keeps
memory for the hidden states of all of them."""


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
        """Pad micro-batches to one length."""
        # torch receives all hidden states of a step into memory of one shape.
        multiple = math.lcm(FILLED_TO, self._parallel.tensor)
        return self._workload.pad_to_one_length(batches, multiple)

    @override
    def train(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, rounds: int
    ) -> list[Loss]:
        """Return the same losses on all ranks of a pipeline; `rounds` must be 1."""
        assert rounds == 1
        loss = self._run_schedule(batches, weights, trains=True)
        self._sum_shared_gradients()
        return [loss]

    @override
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Loss]:
        """Return the same losses on all ranks of a pipeline."""
        chunk_size = EVALUATED_AT_ONCE * self._parallel.micro_batch_multiple
        weights = dict.fromkeys(batches[0].weights, 1.0)
        self._stages.model.eval()
        losses = [
            self._run_schedule(batches[first : first + chunk_size], weights, trains=False)
            for first in range(0, len(batches), chunk_size)
        ]
        self._stages.model.train()
        # Free the memory of its hidden states.
        self._runs.pop(False)
        return losses

    @override
    def set_recomputation(self, share: float) -> None:
        """Set the recomputation for the bubble's figure; the blocks themselves are set
        elsewhere."""
        self._recomputed = share
        self._runs.clear()

    @override
    def figures(self) -> Mapping[str, Any]:
        # No wait: the host has already waited for the step's numbers, which were copied later.
        memory = self._memory.read() if self._memory else ()
        return {"bubble": self._bubble, "memory_by_stage": tuple(map(int, memory))}

    @override
    def set_gradient_sync(self, when: GradientSync) -> None:
        """Check that gradients are summed once a step, as the schedule does."""
        assert when == "step"

    def _run_schedule(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, trains: bool
    ) -> Loss:
        """Run the schedule and return the sum of the losses on every rank of the pipeline."""
        count, run = len(batches), self._get_run(batches, trains=trains)
        for stage in self._stages.stages.values():
            stage.weights, stage.losses = dict(weights), []
        for part in run.stages:
            part.has_backward = trains
            part.clear_runtime_states()
        # Not `step`, which would split tensors: these are micro-batches already.
        run.schedule._step_microbatches(
            [()] * count,
            [{"batch": batch} for batch in batches],
            [None] * count,
            return_outputs=False,
        )
        self._agreement.holds(run.stages)
        return self._gather_loss(weights)

    def _get_run(self, batches: Sequence[Batch], *, trains: bool) -> _Run:
        hidden_shape = self._workload.hidden_shape(batches[0])
        # With sequence parallelism, hidden states between stages are divided over the tensor ranks.
        parts = self._parallel.tensor if self._parallel.sequence else 1
        shape = (hidden_shape[0] // parts, *hidden_shape[1:])
        # A schedule of torch has a fixed number and shape of micro-batches.
        key = (len(batches), *shape)
        if trains not in self._runs or self._runs[trains][0] != key:
            self._runs.pop(trains, None)
            self._runs[trains] = key, self._build_run(len(batches), shape, trains=trains)
        run = self._runs[trains][1]
        self._bubble = run.bubble if trains else self._bubble
        return run

    def _build_run(self, num_micro_batches: int, shape: tuple[int, ...], *, trains: bool) -> _Run:
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
            # The last stage returns its share in the global loss; nothing may rescale its
            # gradients.
            loss_fn=lambda loss, _: loss,
            scale_grads=False,
        )
        # torch derives it from `loss_fn`; an evaluation has one, too.
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

    def _gather_loss(self, weights: Mapping[str, float]) -> Loss:
        """Return the sum of the losses of the last stage on every rank, and gather the ranks'
        memory.

        The numbers stay on the device.
        """
        last = self._stages.stages.get(len(self._stages.costs) - 1)
        loss = _sum_losses(last.losses) if last else None
        names = self._loss_names(loss, weights)
        own_numbers = torch.full(
            (1 + len(names),),
            float(peak_memory_bytes(self._device)),
            **_tensor_options(self._device),
        )
        if loss:
            own_numbers[1:] = torch.stack(names.numbers(loss))
        gathered = [torch.empty_like(own_numbers) for _ in range(self._group.size())]
        dist.all_gather(gathered, own_numbers, group=self._group)
        self._memory = Readback(torch.stack([numbers[0] for numbers in gathered]))
        # The last stage is always on the last rank, also with several stages per rank.
        return names.loss(gathered[-1][1:])

    def _loss_names(self, loss: Loss | None, weights: Mapping[str, float]) -> LossNames:
        """Return the names in a loss, which the last stage sends once."""
        if self._names is None:
            gathered: list[LossNames | None] = [None] * self._group.size()
            own_names = LossNames.of(loss) if loss else None
            dist.all_gather_object(gathered, own_names, group=self._group)
            # In a rehearsal one rank stands for all, so the last stage may be missing.
            self._names = gathered[-1] or LossNames(tuple(weights), ())
        return self._names

    def _sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters that the first and the last stage share, such as a
        tied embedding."""
        # Both add the same two numbers, so gradients and parameters remain equal to the bit.
        ends = (0, self._group.size() - 1)
        if self._stage_rank not in ends:
            return
        peer = ends[self._stage_rank == 0]
        for name in self._stages.shared:
            gradient = self._stages.model.get_parameter(name).grad
            assert gradient is not None
            _add_of_peer(local(gradient), peer, self._group)


@torch.no_grad()
def _add_of_peer(values: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Add the peer's values in place, while it adds these. Collective between the two."""
    if not values.numel():
        return
    received = torch.empty_like(values)
    messages = [
        dist.P2POp(dist.isend, values, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, received, group=group, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    values.add_(received)


def _tensor_options(device: torch.device) -> dict[str, Any]:
    return {"dtype": torch.float64, "device": device}


def _sum_losses(losses: Sequence[Loss]) -> Loss:
    """Return the sum of losses, in float64."""

    def total(values: Sequence[Tensor]) -> Tensor:
        return torch.stack([value.double() for value in values]).sum()

    return Loss(
        {term: total([loss.terms[term] for loss in losses]) for term in losses[0].terms},
        {
            name: Metric(total([loss.metrics[name].total for loss in losses]), metric.per)
            for name, metric in losses[0].metrics.items()
        },
    )
