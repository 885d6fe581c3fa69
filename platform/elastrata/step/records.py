"""The step record: what one optimizer step did. Observers get this value, never the trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One finished optimizer step, over all ranks."""

    step: int
    """Steps done, this one included."""
    samples: int
    """Samples seen since the run began."""
    tokens: int
    """Real tokens seen since the run began."""
    loss: float
    terms: Mapping[str, float]
    """The loss by term: `mlm`..."""
    metrics: Mapping[str, float]
    """The workload's metrics on this batch: `mlm_accuracy`..."""
    lr: float
    gradient_norm: float
    """2-norm of the global batch's before clipping; after it where `clip.scope` is local."""
    digest: str
    """Order-free digest of the batch's sample ids, 16 hex digits."""
    world_size: int
    micro_batches: int
    batch_samples: int
    batch_tokens: int
    seconds: float
    """From asking for the data to the end of the update, on rank 0; evaluations and checkpoints
    lie between steps."""
    seconds_waiting_for_data: float
    seconds_collating: float
    """On a GPU micro-batches are collated ahead: what was not done in time counts as waiting."""
    seconds_in_model: float
    """Forward and backward, with the communication inside; on a GPU those of the device."""
    seconds_in_optimizer: float
    """Clipping and update."""
    padding: float
    """Share of the computed token positions that is padding."""
    imbalance: float
    """Largest work of a rank over the mean."""
    slowest_rank: int | None = None
    """The rank that took longest for its passes, without what it waited for others; None where
    there is one rank, or that is not known."""
    time_imbalance: float | None = None
    """Its seconds over the mean of all ranks."""
    speeds: tuple[int, ...] = ()
    """Of the data ranks, the fastest one's being 256, that the step was dealt by; only where they
    are others than in the step before, and in a group's first step where they are not equal."""
    memory_bytes: int
    """Peak of rank 0: of the device where there is one, else of the process."""
    flops: int
    """Forward and backward over all ranks, by the workload's formula."""
    mfu: float | None
    """Share of the devices' dense bf16 peak; None where the peak is not known."""
    micro_batch_tokens: int | None = None
    """Where the recipe leaves it open: what was chosen for this step, for the kind of worker that
    has most."""
    micro_batch_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)
    """Of each kind of worker, where they differ."""
    activation_checkpointing: str | None = None
    """Likewise chosen for this step."""
    skipped: bool = False
    """Loss or gradient were not finite, and the model stayed as it was."""
    bubble: float | None = None
    """With a pipeline, the share of a step's seconds in the model that a worker waits for others,
    by the schedule and the counted cost of the stages; see `pipeline/microbatches.py`."""
    memory_by_stage: tuple[int, ...] = ()
    """With a pipeline, as `memory_bytes`, of the workers that rank 0 hands its micro-batches on to:
    itself first."""
    flops_of_zeros: int = 0
    """FLOPs, of all `flops`, that are products with weights which `sparsity` holds at zero."""
    layer_sparsity: Mapping[str, float] = field(default_factory=dict)
    """By layer the share of weights that are exactly zero after the step, counted; only where other
    weights are held at zero than before, and in a group's first step."""
    batch_tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Of a mixture, the tokens of each source in the batch. Its loss is in `metrics`, as
    `loss/NAME`, where the batch has any of it."""

    @property
    def losses_by_source(self) -> dict[str, float]:
        """Of a mixture, by name, the source with most tokens in the batch first; those that the
        batch has none of are left out."""
        names = sorted(self.batch_tokens_by_source, key=self.batch_tokens_by_source.__getitem__)
        known = {name: self.metrics.get(f"loss/{name}") for name in reversed(names)}
        return {name: loss for name, loss in known.items() if loss is not None}

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second, over all ranks."""
        return self.batch_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def to_metrics(self) -> dict[str, float]:
        """The values to track, by metric name."""
        tracked = {
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
            tracked["perf/slowest_rank"] = self.slowest_rank
            tracked["perf/time_imbalance"] = self.time_imbalance
        if self.micro_batch_tokens is not None:
            tracked["perf/micro_batch_tokens"] = self.micro_batch_tokens
        if self.bubble is not None:
            tracked["perf/bubble"] = self.bubble
            tracked["perf/memory_bytes"] = max(self.memory_by_stage)
        if self.flops_of_zeros:
            tracked["sparsity/flops_of_zeros"] = self.flops_of_zeros / self.flops
        return tracked if self.mfu is None else {**tracked, "perf/mfu": self.mfu}


def losses_by_source(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of the sources, by name."""
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[2]: loss for name, loss in parts if len(name) == 3 and name[1] == "loss"}


def losses_by_set(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those on further sets, by name; `metrics` as above."""
    parts = [(name.split("/"), loss) for name, loss in metrics.items()]
    return {name[1]: loss for name, loss in parts if len(name) == 3 and name[2] == "loss"}


class Stopwatch:
    """Seconds by name, since the birth of the object and one after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def passed(self, name: str) -> None:
        """The phase of that name ends now, and the next begins."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
