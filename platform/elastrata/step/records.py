"""The step record: the result of one optimizer step, which observers receive."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished optimizer step, over all ranks."""

    step: int
    """Number of finished steps, this one included."""
    samples: int
    """Samples seen since the run began."""
    tokens: int
    """Real tokens seen since the run began."""
    loss: float
    terms: Mapping[str, float]
    """Loss by term, such as `mlm`."""
    metrics: Mapping[str, float]
    """The workload's metrics on this batch, such as `mlm_accuracy`."""
    lr: float
    gradient_norm: float
    """2-norm of the global batch's gradient before clipping, or after it if `clip.scope` is
    local."""
    digest: str
    """Digest of the batch's sample ids in any order, 16 hex digits."""
    world_size: int
    micro_batches: int
    batch_samples: int
    batch_tokens: int
    seconds: float
    """From the request of the data to the end of the update, on rank 0, without evaluations and
    checkpoints, which run between steps."""
    seconds_waiting_for_data: float
    seconds_collating: float
    """On a GPU, micro-batches are collated in advance; unfinished collation counts as waiting
    for data."""
    seconds_in_model: float
    """Forward and backward with their communication; on a GPU, time of the device."""
    seconds_in_optimizer: float
    """Clipping and update."""
    padding: float
    """Share of padding in the computed token positions."""
    imbalance: float
    """Largest work of a rank over the mean work."""
    slowest_rank: int | None = None
    """Rank with the longest compute time, without its waits for other ranks; None with one rank,
    or if unknown."""
    time_imbalance: float | None = None
    """Compute time of the slowest rank over the mean of all ranks."""
    speeds: tuple[int, ...] = ()
    """Relative speeds of the data ranks by which the step was dealt; the fastest has 256.

    Set only if they differ from those of the previous step, or in a group's first step if they are
    unequal.
    """
    memory_bytes: int
    """Peak of rank 0: memory of its GPU if it has one, else of its process."""
    flops: int
    """Forward and backward over all ranks, by the workload's formula."""
    mfu: float | None
    """Share of the devices' dense bf16 peak; None if the peak is unknown."""
    micro_batch_tokens: int | None = None
    """Value chosen for this step if the recipe has `auto`: the largest among the kinds of
    workers."""
    micro_batch_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Values by kind of worker, if they differ."""
    activation_checkpointing: str | None = None
    """Value chosen for this step if the recipe has `auto`."""
    skipped: bool = False
    """Loss or gradient were not finite, and the model was not updated."""
    bubble: float | None = None
    """With a pipeline, the share of the seconds in the model that a worker waits for other stages.

    It follows from the schedule and the counted cost of the stages; see `pipeline/microbatches.py`.
    """
    memory_by_stage: tuple[int, ...] = ()
    """With a pipeline, `memory_bytes` of the workers in the pipeline of rank 0, which is the
    first."""
    flops_of_zeros: int = 0
    """Those of `flops` that multiply with weights which `sparsity` holds at zero."""
    layer_sparsity: Mapping[str, float] = field(default_factory=dict)
    """Counted share of exact zeros after the step, by layer.

    Set only if masks have changed, and in a group's first step.
    """
    batch_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """With a mixture, tokens in the batch by source.

    The loss of each source in the batch is in `metrics`, as `loss/NAME`.
    """

    @property
    def losses_by_source(self) -> dict[str, float]:
        """With a mixture, the loss of each source in the batch, in descending order of tokens."""
        names = sorted(self.batch_tokens_by_source, key=self.batch_tokens_by_source.__getitem__)
        losses = {name: self.metrics.get(f"loss/{name}") for name in reversed(names)}
        return {name: loss for name, loss in losses.items() if loss is not None}

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, over all ranks."""
        return self.batch_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(self)

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics to track, by name."""
        metrics = {
            "train/loss": self.loss,
            **{f"train/{name}_loss": value for name, value in self.terms.items()},
            **{f"train/{name}": value for name, value in self.metrics.items()},
            "train/lr": self.lr,
            "train/gradient_norm": self.gradient_norm,
            "progress/samples": self.samples,
            "progress/tokens": self.tokens,
            "perf/tokens_per_second": self.tokens_per_second,
            "perf/seconds_per_step": self.seconds,
            "perf/seconds_waiting_for_data": self.seconds_waiting_for_data,
            "perf/padding": self.padding,
            "perf/imbalance": self.imbalance,
            "perf/memory_bytes": self.memory_bytes,
            "perf/world_size": self.world_size,
            **{f"sparsity/{layer}": share for layer, share in self.layer_sparsity.items()},
            **{
                f"mixture/share/{name}": tokens / self.batch_tokens
                for name, tokens in self.batch_tokens_by_source.items()
            },
        }
        if self.time_imbalance is not None and self.slowest_rank is not None:
            metrics["perf/slowest_rank"] = self.slowest_rank
            metrics["perf/time_imbalance"] = self.time_imbalance
        if self.micro_batch_tokens is not None:
            metrics["perf/micro_batch_tokens"] = self.micro_batch_tokens
        if self.bubble is not None:
            metrics["perf/bubble"] = self.bubble
            # The stage that is closest to its memory limit.
            metrics["perf/memory_bytes"] = max(self.memory_by_stage)
        if self.flops_of_zeros:
            metrics["sparsity/flops_of_zeros"] = self.flops_of_zeros / self.flops
        return metrics if self.mfu is None else {**metrics, "perf/mfu": self.mfu}


def losses_by_source(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of the sources of a mixture, by name.

    Args:
        metrics: as of a `StepRecord`, named `train/loss/NAME`.
    """
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[2]: loss for name, loss in parts if len(name) == 3 and name[1] == "loss"}


def losses_by_set(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of further held-out sets, by name.

    Args:
        metrics: as of an evaluation, named `eval/NAME/loss`.
    """
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[1]: loss for name, loss in parts if len(name) == 3 and name[2] == "loss"}


class Stopwatch:
    """Measures consecutive phases, in seconds by name, from its creation on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end_phase(self, name: str) -> None:
        """End the phase `name` and start the next one. Repeated names add up."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
