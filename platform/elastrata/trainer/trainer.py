"""The trainer: one rank's training, from data to saved state. Read it from top to bottom.

`Trainer.train` is the outer loop: a step, then evaluation, checkpoint and the end of the run if
they are due. `Loop.run` is the step itself: data, forward, backward, clip, update, record.
`Trainer` has the model and all state that training changes.

Nothing here depends on Ray. Every worker of a group has a trainer, and so has the trial of a sweep.
`elastrata bench` and the rehearsals run the same `Loop`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elastrata.checkpoints.commit import FRESH_OPTIMIZER, Commit, CommitStorage
from elastrata.checkpoints.state import load, part_is_saved, restore, training_state
from elastrata.device.capabilities import peak_flops, peak_memory_bytes, reset_peak_memory
from elastrata.optim.optimizer import build_optimizer, set_learning_rate
from elastrata.parallel.mesh import ALONE, DataRank
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata.sparsity.masks import Masks
from elastrata.step.average import AVERAGE, WeightAverage
from elastrata.step.clip import Clip
from elastrata.step.compute_time import ComputeTime, build_compute_time
from elastrata.step.evaluate import evaluate
from elastrata.step.events import Action, Chosen, RanOut, RanOutError, TrainingError
from elastrata.step.forward_backward import ForwardBackward
from elastrata.step.prefetch import Background, BackgroundThread, Prefetch, ReadyStep
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.step_message import Effort, StepMessage, encode
from elastrata.step.target import TargetConfig, is_reached
from elastrata.step.train_step import (
    StepHooks,
    StepLoss,
    StepResult,
    do_nothing,
    reduce_sums,
    total_weights,
    train_step,
)
from elastrata.trainer.autotune import ChoiceTuner, build_tuner
from elastrata.trainer.build_model import (
    build_divided_model,
    build_masks,
    build_weight_average,
    settle,
)
from elastrata.trainer.initial_weights import load_parent
from elastrata.workload.batch import Batch
from elastrata.workload.workload import Workload
from elastrata_pipelines.batches import Start
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.hashing import digest
from elastrata_pipelines.payload import RankStep, check_order
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.speeds import RankKinds, Speeds

if TYPE_CHECKING:
    # For their types alone: the checkpoint manager imports Ray, which benchmarks do without.
    from elastrata.trainer.checkpoint_manager import CheckpointManager
    from elastrata.trainer.evaluation import HeldOutData
    from elastrata.trainer.reporter import Reporter


def _go_on() -> Action:
    return Action.GO_ON


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class LoopHooks:
    """Functions that the loop calls. The defaults do nothing."""

    requested_action: Callable[[], Action] = _go_on
    """Returns the action requested of all ranks, on rank 0; elsewhere `Action.GO_ON`."""
    before_change: Callable[[], None] = do_nothing
    """Called before weights, masks or the optimizer's state may change."""
    on_choice: Callable[[Chosen], None] = _ignore
    """Called with the group's choice of keys that the recipe leaves open."""
    on_times: Callable[[RankStep, Sequence[Effort]], None] = _ignore
    """Called with every step and the efforts of all ranks, by rank."""


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """A finished step, after its evaluation and its save if they were due."""

    record: StepRecord
    metrics: Mapping[str, float]
    """The evaluation's results by name; empty if no evaluation was due."""
    evaluation_seconds: float
    action: Action
    """The action that all ranks have agreed on."""
    is_last: bool
    """True if the run ends with this step: its last one, or the one that reached its target."""


class Trainer:
    """Model, optimizer, masks and automatic choices. All methods are collective. The first to call
    is `begin` or `restore`.

    Args:
        recipe: the recipe.
        phases: the run's phases.
        device: of this rank.
        world_size: ranks of the process group.
        per_node: number of ranks that share this machine and its memory.
        place: of this rank among the data ranks.
        kinds: kinds of the data ranks, by their memory; empty if all are of one kind.
    """

    def __init__(
        self,
        recipe: Recipe,
        phases: Sequence[Phase],
        device: torch.device,
        *,
        world_size: int,
        per_node: int,
        place: DataRank = ALONE,
        kinds: RankKinds = (),
    ) -> None:
        recipe = settle(recipe, device)
        if device.type == "cuda":
            # TF32 for products in fp32: several times as fast, with more digits than bf16.
            torch.set_float32_matmul_precision("high")
        self._recipe, self._device = recipe, device
        self._world_size, self._place = world_size, place
        self._vocabulary = phases[0].batches.manifest.vocabulary
        self._seq_len = max(phase.batches.manifest.seq_len for phase in phases)
        self._divided = build_divided_model(
            recipe, self._vocabulary, self._seq_len, device, world_size, draws=False
        )
        self.model = self._divided.model
        self.optimizer = build_optimizer(
            recipe.optimizer, self.model, recipe.workload.blocks(self.model)
        )
        self._masks = build_masks(recipe, self._divided)
        self._average = build_weight_average(recipe, self.model)
        self._chooser = build_tuner(
            recipe,
            phases,
            self._divided.recompute,
            device,
            world_size=world_size,
            per_node=per_node,
            synchronize=self._divided.forward_backward.set_gradient_sync,
            kinds=kinds,
            data_rank=place.rank,
        )

    def begin(self, parent: Parent | None = None) -> None:
        """Begin a new run: initialise the weights at random, then load those that a parent has.

        Raises:
            UserError: the parent is missing or damaged.
        """
        # First at random, also with a parent: it may lack rows of new token ids.
        self._divided.draw()
        if parent:
            model = self._recipe.workload, self._vocabulary, self._seq_len
            load_parent(parent, *model, self.model, self.optimizer)
        if self._average:
            self._average.begin()

    def restore(self, checkpoints: CommitStorage, commit: Commit) -> None:
        """Resume from a commit.

        Raises:
            UserError: the commit is damaged or belongs to another model.
        """
        # After a fork with another optimizer, its saved state fits no longer.
        optimizers = () if commit.extra.get(FRESH_OPTIMIZER) else (self.optimizer,)
        restore(checkpoints, commit, self.model, *optimizers)
        if self._masks:
            self._masks.restore(commit.step, partial(load, checkpoints, commit))
        if self._average:
            self._restore_average(self._average, checkpoints, commit)
        self._chooser.restore(commit.extra)

    def avoid(self, choices: Iterable[RanOut]) -> None:
        """Exclude the choices that ran out of memory in earlier groups."""
        self._chooser.avoid(choices)

    def state(self) -> dict[str, Any]:
        """Return the live tensors of a checkpoint."""
        masks = self._masks.state() if self._masks else {}
        average = self._average.state() if self._average else {}
        return training_state(self.model, self.optimizer) | masks | average

    def extra(self) -> dict[str, Any]:
        """Return further values for the commit."""
        return self._chooser.state()

    def train(
        self,
        stream: Iterable[RankStep],
        start: Start,
        *,
        held_out: HeldOutData,
        checkpoints: CheckpointManager,
        reporter: Reporter,
        target: TargetConfig | None,
        on_times: Callable[[RankStep, Sequence[Effort]], None] = _ignore,
    ) -> Iterator[TrainedStep]:
        """Train until the run ends or the caller closes the generator. Collective.

        Args:
            stream: this rank's part of every remaining step.
            start: progress of the run before the first of them.
            held_out: data of the evaluations.
            checkpoints: saves the state.
            reporter: reports steps and evaluations.
            target: ends the run when an evaluation reaches it; None: never.
            on_times: as in `LoopHooks`.

        Raises:
            WrongStepError: the stream has steps of other ranks, or not the remaining steps.
        """
        # A run that began with given weights is evaluated before its first step, as step 0.
        if at_once := held_out.steps_due_at_start():
            reporter.on_evaluation(0, *self.evaluate(at_once))
        hooks = LoopHooks(
            requested_action=checkpoints.requested_action,
            before_change=checkpoints.before_change,
            on_choice=reporter.on_choice,
            on_times=on_times,
        )
        # Ends the background work of the steps when the caller closes this generator.
        with closing(self.steps(stream, start, hooks)) as steps:
            for record, action in steps:
                reporter.on_step(record)
                metrics, seconds = dict[str, float](), 0.0
                is_last = record.step == self._recipe.steps_in_all
                if due := held_out.due(record):
                    losses, seconds = self.evaluate(due)
                    metrics = dict(reporter.on_evaluation(record.step, losses, seconds))
                    # Rank 0 decides, so that all ranks stop at the same step.
                    if target and broadcast_value(is_reached(target, metrics)):
                        reporter.on_target(record, target.metric, metrics[target.metric])
                        is_last = True
                # After the evaluation, which the commit carries, and before the yield, as the
                # caller may stop at any step that it has received.
                checkpoints.save(record, action, is_last=is_last)
                yield TrainedStep(
                    record=record,
                    metrics=metrics,
                    evaluation_seconds=seconds,
                    action=action,
                    is_last=is_last,
                )
                if is_last:
                    return

    def steps(
        self, stream: Iterable[RankStep], start: Start, hooks: LoopHooks
    ) -> Generator[tuple[StepRecord, Action]]:
        """Train on the steps of a stream, without evaluations and checkpoints.

        Yields:
            The record of every step, and the action that all ranks have agreed on. Once the
            generator is closed, no background work is left.

        Raises:
            WrongStepError: the stream has steps of other ranks, or not the remaining steps.
        """
        recipe = self._recipe
        loop = build_loop(
            recipe,
            self._divided.clip,
            self._vocabulary,
            self._device,
            self._world_size,
            is_primary=self._place.is_primary,
            masks=self._masks,
            # Hooks in blocks would interrupt compiled graphs.
            blocks=() if recipe.compile else self._divided.blocks,
        )
        place, last = self._place, recipe.steps_in_all
        run = loop.run(
            self._divided.forward_backward,
            self.optimizer,
            check_order(stream, place.rank, place.dp_size, done=start.step, last=last),
            start,
            hooks,
            chooser=self._chooser,
        )
        with self._convert_out_of_memory(), closing(run):
            for record, action in run:
                # A skipped step changed no weights.
                if self._average and not record.skipped:
                    self._average.stepped(record.step)
                yield record, action

    def evaluate(self, held_out: Mapping[str, RankStep]) -> tuple[dict[str, StepLoss], float]:
        """Evaluate the model, or its average if the recipe says so, on each set of held-out data.

        Returns:
            The losses by name of the set, over all ranks, and the seconds that this took.
        """
        began = time.perf_counter()
        with self._convert_out_of_memory(), self._evaluated_weights():
            losses = {name: self._loss(step) for name, step in held_out.items()}
        return losses, time.perf_counter() - began

    def _loss(self, held_out: RankStep) -> StepLoss:
        return evaluate(
            self._divided.forward_backward,
            self._recipe.workload,
            self._chooser.cut_step(held_out).micro_batches,
            self._vocabulary,
            self._device,
            is_primary=self._place.is_primary,
        )

    def _restore_average(
        self, average: WeightAverage, checkpoints: CommitStorage, commit: Commit
    ) -> None:
        """Restore the average from a commit, or start it here if the commit has none."""
        if part_is_saved(checkpoints, commit, AVERAGE):
            load(checkpoints, commit, average.state())
        else:
            average.begin()

    def _evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate."""
        config = self._recipe.average
        is_average = self._average and config and config.evaluated
        return self._average.swap_in() if self._average and is_average else nullcontext()

    @contextmanager
    def _convert_out_of_memory(self) -> Iterator[None]:
        """Raise `RanOutError` with the choice that ran out of memory, if a smaller one exists."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if ran_out := self._chooser.ran_out():
                raise RanOutError(ran_out) from error
            raise


def broadcast_value(value: Any) -> Any:
    """Return rank 0's value on every rank. Collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def deal_checksums(speeds: Speeds) -> dict[str, float]:
    """Return this rank's values for `check_same_deal`, which are summed over all primary ranks."""
    return {"hands": 1, "dealt_by": _checksum(speeds)}


def check_same_deal(sums: Mapping[str, float], speeds: Speeds) -> None:
    """Check by their sums that all ranks' steps were dealt by these speeds.

    Raises:
        RuntimeError: they were not, so the group has to restart.
    """
    # If deals differ, at least one rank has speeds. So ranks without speeds need no check.
    if speeds and sums["dealt_by"] != sums["hands"] * _checksum(speeds):
        raise RuntimeError("the ranks have samples of different deals")


def _checksum(speeds: Speeds) -> int:
    return zlib.crc32(repr(speeds).encode()) if speeds else 0


_HALF = 2**32
_WEIGHT, _SOURCE = "weight/", "source/"


def thread_for_gpu(device: torch.device) -> Background | None:
    """Return the thread that prepares the next step on a GPU, or None on a CPU, which has no
    time to spare."""
    return BackgroundThread(device) if device.type == "cuda" else None


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
    step_hooks: StepHooks = field(default_factory=StepHooks)
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
        hooks: LoopHooks | None = None,
        *,
        chooser: ChoiceTuner | None = None,
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
            hooks: called from within the loop; None: none.
            chooser: chooses what the recipe leaves open, such as the micro-batches of a step;
                None: nothing is open.
        """
        hooks = hooks or LoopHooks()
        prepare = partial(self._prepare_step, forward_backward)
        background = self.background(self.device)
        # Own times are only compared between ranks, so a single rank needs no hooks in its blocks.
        timer = build_compute_time(self.device, self.blocks if self.world_size > 1 else ())
        samples, tokens = start.samples, start.tokens
        next_sums: Mapping[str, float] | None = None
        foreseen = chooser.foreseen if chooser else _same_step
        with closing(timer), Prefetch(stream, prepare, foreseen, background) as steps:
            # The peak of the build would hide that of the steps.
            reset_peak_memory(self.device)
            stopwatch, dealt_by = Stopwatch(), Speeds()
            # A chooser asks for a step when the one before is finished and measured.
            for rank_step in chooser.cut(steps, hooks.on_choice) if chooser else steps:
                stopwatch.end_phase("seconds_waiting_for_data")
                ready, action = steps.ready(rank_step), hooks.requested_action()
                # The sums of this step came with the losses of the step before, if it was ready by
                # then. That saves an all-reduce and a wait for the GPU.
                batch = next_sums or reduce_sums(ready.sums, is_primary=self.is_primary)
                check_same_deal(batch, rank_step.speeds)
                stopwatch.end_phase("seconds_collating")
                # Masks that begin with this step change weights, and a copy of them may be in
                # progress.
                if self.step_hooks.changes_before(rank_step.step):
                    hooks.before_change()
                self.step_hooks.before_step(rank_step.step, optimizer)
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
                    hooks=self.step_hooks,
                    # Written after the backward pass: then this rank's time is measured and the
                    # next step likely ready.
                    more=partial(self._write_message, action, timer, rank_step.work, steps, names),
                    before_change=hooks.before_change,
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
                    **self.step_hooks.figures(int(batch["tokens"])),
                    **self._time_fields(stopwatch, batch["flops"]),
                )
                hooks.on_times(rank_step, message.efforts)
                if chooser:
                    record = replace(record, **chooser.figures())
                yield record, message.action
                # After the yield, so that evaluation and saving count for no step.
                stopwatch, dealt_by = Stopwatch(), rank_step.speeds

    def _write_message(
        self, action: Action, timer: ComputeTime, work: int, steps: Prefetch, names: Sequence[str]
    ) -> Tensor:
        """Return this rank's message to the others, which travels with the losses."""
        ready = steps.next_ready
        return encode(
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
            **deal_checksums(rank_step.speeds),
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
        stopwatch.end_phase("rest")
        seconds, peak = sum(stopwatch.seconds.values()), peak_flops(self.device)
        mfu = flops / (seconds * peak * self.world_size) if peak else None
        return {"seconds": seconds, "mfu": mfu, **phases}


def _same_step(rank_step: RankStep) -> RankStep:
    return rank_step


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
        f"{result.gradient_norm:g}: not finite, so nothing was updated; try a smaller "
        "optimizer.lr, "
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


def build_loop(
    recipe: Recipe,
    clip: Clip,
    vocabulary: Vocabulary,
    device: torch.device,
    world_size: int,
    *,
    is_primary: bool = True,
    masks: Masks | None = None,
    blocks: Sequence[nn.Module] = (),
) -> Loop:
    """Return the recipe's loop."""
    return Loop(
        workload=recipe.workload,
        vocabulary=vocabulary,
        seed=recipe.seed,
        learning_rate=recipe.learning_rate,
        clip=clip,
        on_nonfinite=recipe.on_nonfinite,
        device=device,
        world_size=world_size,
        is_primary=is_primary,
        step_hooks=masks or StepHooks(),
        blocks=blocks,
    )
