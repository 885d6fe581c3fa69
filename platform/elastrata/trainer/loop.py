"""The training loop: rows in, step records out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from elastrata.device.capabilities import forget_peak, peak_flops, peak_memory_bytes
from elastrata.optim.optimizer import set_learning_rate
from elastrata.step.clip import Clip
from elastrata.step.compute_time import OwnTime, own_time
from elastrata.step.events import Action, TrainingError
from elastrata.step.forward_backward import ForwardBackward
from elastrata.step.prefetch import Background, BackgroundThread, Prefetch, ReadyStep
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.step_message import Effort, StepMessage, written
from elastrata.step.train_step import (
    StepHooks,
    StepResult,
    nothing,
    reduce_sums,
    total_weights,
    train_step,
)
from elastrata.workload.batch import Batch
from elastrata.workload.workload import Workload
from elastrata_pipelines.batches import Start
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.hashing import digest
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.speeds import Speeds


def deal_marks(speeds: Speeds) -> dict[str, float]:
    """Return this rank's values for `check_same_deal`, which are summed over all primary ranks."""
    return {"hands": 1, "dealt_by": _checksum(speeds)}


def check_same_deal(sums: Mapping[str, float], speeds: Speeds) -> None:
    """Check by their sums that all ranks' steps were dealt by these speeds.

    Raises:
        RuntimeError: they were not, so the group has to restart.
    """
    # If deals differ, at least one rank has speeds. So ranks without speeds need no check.
    if speeds and sums["dealt_by"] != sums["hands"] * _checksum(speeds):
        raise RuntimeError("the ranks have hands of different deals")


def _checksum(speeds: Speeds) -> int:
    return zlib.crc32(repr(speeds).encode()) if speeds else 0


_HALF = 2**32
_WEIGHT, _SOURCE = "weight/", "source/"
Cut = Callable[[Iterable[RankStep]], Iterable[RankStep]]


def thread_for_gpu(device: torch.device) -> Background | None:
    """Return the thread that prepares the next step on a GPU, or None on a CPU, which has no
    time to spare."""
    return BackgroundThread(device) if device.type == "cuda" else None


def as_it_is(rank_step: RankStep) -> RankStep:
    """Return the step unchanged: the default of `foreseen`."""
    return rank_step


def unmeasured(rank_step: RankStep, efforts: Sequence[Effort]) -> None:
    """No-op default for `measured`."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The training loop, with all that is constant over the steps."""

    workload: Workload
    vocabulary: Vocabulary
    seed: int
    learning_rate: Callable[[int], float]
    """Learning rate of a step, counted from 0."""
    clip: Clip
    """Clips the gradient of the trained model."""
    on_nonfinite: Literal["stop", "skip"]
    device: torch.device
    world_size: int
    is_primary: bool = True
    """Whether this rank's sums over samples are counted, as in `DataRank`."""
    hooks: StepHooks = field(default_factory=StepHooks)
    """Hooks into a step."""
    blocks: Sequence[nn.Module] = ()
    """The model's blocks, in which a rank's own compute time is measured."""
    background: Callable[[torch.device], Background | None] = thread_for_gpu
    """Returns the executor that prepares the next step, given this rank's device."""

    def run(
        self,
        forward_backward: ForwardBackward,
        optimizer: torch.optim.Optimizer,
        stream: Iterable[RankStep],
        start: Start,
        asked: Callable[[], Action],
        *,
        cut: Cut = iter,
        foreseen: Callable[[RankStep], RankStep | None] = as_it_is,
        before_change: Callable[[], None] = nothing,
        measured: Callable[[RankStep, Sequence[Effort]], None] = unmeasured,
    ) -> Generator[tuple[StepRecord, Action]]:
        """Train on every step of `stream` and yield its record with the action after it. Only the
        seconds and memory of a record differ between ranks.

        On a GPU the next step is read and prepared in the background, until the generator is
        closed.

        Args:
            forward_backward: forward and backward pass through the model.
            optimizer: over the model's parameters.
            stream: this rank's part of every remaining step.
            start: progress of the run before the first of them.
            asked: returns the action requested of all ranks, on rank 0; elsewhere `Action.GO_ON`.
            cut: maps the stream to the steps that are trained; each is requested when the one
                before is finished.
            foreseen: returns a later step as `cut` will yield it, or None if that is not yet
                determined.
            before_change: called before weights, masks or the optimizer's state may change.
            measured: called with every step and the efforts of all ranks, by rank.
        """
        prepare = partial(self._prepare_step, forward_backward)
        background = self.background(self.device)
        # Own times are only compared between ranks, so a single rank needs no hooks in its blocks.
        timer = own_time(self.device, self.blocks if self.world_size > 1 else ())
        samples, tokens = start.samples, start.tokens
        next_sums: Mapping[str, float] | None = None
        with closing(timer), Prefetch(stream, prepare, foreseen, background) as steps:
            # The peak of the build would hide that of the steps.
            forget_peak(self.device)
            stopwatch, dealt_by = Stopwatch(), Speeds()
            for rank_step in cut(steps):
                stopwatch.passed("seconds_waiting_for_data")
                ready, action = steps.ready(rank_step), asked()
                # The sums of this step came with the losses of the step before, if it was ready by
                # then. That saves an all-reduce and a wait for the GPU.
                batch = next_sums or reduce_sums(ready.sums, is_primary=self.is_primary)
                check_same_deal(batch, rank_step.speeds)
                stopwatch.passed("seconds_collating")
                # Masks that begin with this step change weights, and a copy of them may be in
                # progress.
                if self.hooks.changes_before(rank_step.step):
                    before_change()
                self.hooks.before_step(rank_step.step, optimizer)
                lr = self.learning_rate(rank_step.step - 1)
                set_learning_rate(optimizer, lr)
                # Sorted, so that all ranks pack their sums in the same order into one message.
                names = sorted(ready.sums) if steps.reads_ahead else []
                timer.begin()
                result = train_step(
                    forward_backward,
                    optimizer,
                    ready.batches,
                    weights=_weights(batch),
                    clip=self.clip,
                    rounds=rank_step.rounds,
                    is_primary=self.is_primary,
                    hooks=self.hooks,
                    # Written after the backward pass: then this rank's time is measured and the
                    # next step likely ready.
                    more=partial(self._write_message, action, timer, rank_step.work, steps, names),
                    before_change=before_change,
                )
                if result.skipped and self.on_nonfinite == "stop":
                    raise TrainingError(_nonfinite_message(rank_step.step, result))
                message = StepMessage.read(result.more, names, self.world_size)
                next_sums = message.next_sums
                samples, tokens = samples + int(batch["samples"]), tokens + int(batch["tokens"])
                record = StepRecord(
                    samples=samples,
                    tokens=tokens,
                    lr=lr,
                    **self._step_fields(rank_step),
                    # Recorded only if they change, as they are one number per rank.
                    speeds=rank_step.speeds if rank_step.speeds != dealt_by else (),
                    **_effort_fields(message.efforts),
                    **forward_backward.figures(),
                    **_loss_fields(result),
                    **_batch_fields(batch),
                    **self.hooks.figures(int(batch["tokens"])),
                    **self._time_fields(stopwatch, batch["flops"]),
                )
                measured(rank_step, message.efforts)
                yield record, message.action
                # After the yield, so that evaluation and saving count for no step.
                stopwatch, dealt_by = Stopwatch(), rank_step.speeds

    def _write_message(
        self, action: Action, timer: OwnTime, work: int, steps: Prefetch, names: Sequence[str]
    ) -> Tensor:
        """Return this rank's message to the others, which travels with the losses."""
        ready = steps.next_ready
        return written(
            action,
            timer.effort(work),
            ready.sums if ready else None,
            names,
            self.device,
            world_size=self.world_size,
            is_primary=self.is_primary,
        )

    def _prepare_step(self, forward_backward: ForwardBackward, rank_step: RankStep) -> ReadyStep:
        """Return a step collated and moved to the device. Reads nothing back from the device."""
        batches = forward_backward.ready(self._collate(rank_step))
        return ReadyStep(batches=batches, sums=self._sums(rank_step, batches))

    def _collate(self, rank_step: RankStep) -> list[Batch]:
        return [
            self.workload.collate(rows, self.vocabulary, self.seed).to(self.device)
            for rows in rank_step.micro_batches
        ]

    def _sums(self, rank_step: RankStep, batches: list[Batch]) -> dict[str, float]:
        """Return this rank's part of the sums over the global batch that the forward pass needs."""
        weights = total_weights(batches)
        # In halves, so that the sum of the ranks' digests is exact in float64.
        upper, lower = divmod(digest(rank_step.rows.identities), _HALF)
        segments = rank_step.rows.segment_lengths.tolist()
        return {
            **{_WEIGHT + term: weight for term, weight in weights.items()},
            "samples": len(rank_step.rows),
            "tokens": len(rank_step.rows.tokens),
            "positions": sum(batch.num_positions for batch in batches),
            "flops": self.workload.flops(segments, weights, self.vocabulary),
            **{_SOURCE + name: n for name, n in rank_step.rows.source_tokens.items()},
            **deal_marks(rank_step.speeds),
            "digest_upper": upper,
            "digest_lower": lower,
        }

    def _step_fields(self, rank_step: RankStep) -> dict[str, Any]:
        return {
            "step": rank_step.step,
            "world_size": self.world_size,
            "micro_batches": len(rank_step.cuts) - 1,
            "imbalance": rank_step.imbalance,
            "memory_bytes": peak_memory_bytes(self.device),
        }

    def _time_fields(self, stopwatch: Stopwatch, flops: float) -> dict[str, Any]:
        # Copied before `rest` is added, which belongs to the total only.
        phases = dict(stopwatch.seconds)
        stopwatch.passed("rest")
        seconds, peak = sum(stopwatch.seconds.values()), peak_flops(self.device)
        mfu = flops / (seconds * peak * self.world_size) if peak else None
        return {"seconds": seconds, "mfu": mfu, **phases}


def _weights(batch: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removeprefix(_WEIGHT): value
        for name, value in batch.items()
        if name.startswith(_WEIGHT)
    }


def _nonfinite_message(step: int, result: StepResult) -> str:
    terms = ", ".join(f"{name} {value:g}" for name, value in result.loss.terms.items())
    return (
        f"step {step}: loss {result.loss.total:g} ({terms}), gradient norm "
        f"{result.gradient_norm:g}: not finite, nothing was updated; try a smaller optimizer.lr, "
        "or on_nonfinite=skip to leave such batches out"
    )


def _effort_fields(efforts: Sequence[Effort]) -> dict[str, Any]:
    seconds = [effort.seconds for effort in efforts]
    # A time of zero was not measured, e.g. on a GPU whose first events are not finished.
    if not seconds or not all(seconds):
        return {}
    longest = max(seconds)
    return {
        "slowest_rank": seconds.index(longest),
        "time_imbalance": longest * len(seconds) / sum(seconds),
    }


def _loss_fields(result: StepResult) -> dict[str, Any]:
    return {
        "loss": result.loss.total,
        "terms": result.loss.terms,
        "metrics": result.loss.metrics,
        "gradient_norm": result.gradient_norm,
        "skipped": result.skipped,
        "seconds_in_model": result.seconds_in_model,
        "seconds_in_optimizer": result.seconds_in_optimizer,
    }


def _batch_fields(batch: Mapping[str, float]) -> dict[str, Any]:
    # Modulo 2**64: the sum does not depend on the order or the ranks of the samples.
    whole = (int(batch["digest_upper"]) * _HALF + int(batch["digest_lower"])) % 2**64
    return {
        "digest": f"{whole:016x}",
        "batch_samples": int(batch["samples"]),
        "batch_tokens": int(batch["tokens"]),
        "batch_tokens_by_source": {
            name.removeprefix(_SOURCE): int(tokens)
            for name, tokens in batch.items()
            if name.startswith(_SOURCE)
        },
        "padding": 1 - batch["tokens"] / batch["positions"],
        "flops": int(batch["flops"]),
    }
