"""The worker: the program of every rank of a group, from the first import to the last
checkpoint."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, Protocol

import ray.train
import ray.util
import torch
import torch.distributed as dist
from typing_extensions import override

from elastrata.checkpoints.commit import MARKER, Commit, CommitStorage
from elastrata.cluster.channel import Sender, send_event
from elastrata.cluster.failure_attribution import is_victim
from elastrata.cluster.hang_trace import HangTrace, set_group_timeouts, trace_prefix
from elastrata.cluster.job import Job
from elastrata.cluster.node_speeds import kinds_by_node
from elastrata.cluster.prestarted import SPARE_BYTES, SparePool, count_affordable
from elastrata.cluster.scaling_machine import split_groups_warning
from elastrata.cluster.source import get_resume_point
from elastrata.cluster.staying_workers import (
    ReleasedError,
    free_frames,
    join_group,
    wait_for_release,
)
from elastrata.device.capabilities import current_device, device_name, spare_bytes
from elastrata.device.device_transfer import AbortedError, raise_if_aborted
from elastrata.parallel.mesh import DataRank, data_rank
from elastrata.parallel.parallelize import ParallelConfig
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.history import prepare_attempt
from elastrata.step.events import (
    Action,
    ControlSignal,
    Evaluated,
    Event,
    RanOut,
    RanOutError,
    Refused,
    Started,
    Stopped,
    Substituted,
    Warned,
)
from elastrata.step.records import StepRecord, Stopwatch
from elastrata.step.target import is_over
from elastrata.trainer.autotune import describe_fitting_choices
from elastrata.trainer.balancing import PaceMonitor, RankPlace, idle_rank_lines
from elastrata.trainer.build_model import missing_features, probe_capabilities
from elastrata.trainer.checkpoint_manager import CheckpointManager, Saving
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.reporter import Reporter
from elastrata.trainer.resume import ResumePoint
from elastrata.trainer.trainer import Trainer, broadcast_value
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.retry import retry_storage_action
from elastrata_pipelines.speeds import RankKinds
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import RankStream, open_parts

STREAM = "train"
"""The name of the data set that Ray Train shards among the workers."""
SPARES_AFTER_SECONDS = 5.0
"""Delay before spare processes start, so that their imports do not slow the first steps."""
_VICTIMS_SECONDS = 0.5
"""Delay of an error that another rank has caused, so that the controller hears of the cause
first."""
_done_once: set[str] = set()
"""One-time actions that this process, which may serve in several groups, has already done."""


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's entry point: `config["job"]` is the `Job`."""
    join_group()
    job: Job = config["job"]
    rank = ray.train.get_context().get_world_rank()
    trace = HangTrace(trace_prefix(job.run.uri()), rank, job.recipe.workers.hang_seconds)
    sender = WorkerSender(job.channel, rank=rank, trace=trace)
    try:
        with ExitStack() as closing:
            _train(job, sender, closing)
    except (ReleasedError, AbortedError):
        return
    except UserError as error:
        sender.send(Refused(problems=error.problems))
        raise
    except RanOutError as error:
        # The driver records the choice in the history, so that the next attempt avoids it.
        sender.send(error.told)
        raise
    except torch.OutOfMemoryError as error:
        # A restart would run out of memory again, so the run ends, with advice.
        refused = UserError(describe_fitting_choices(job.recipe, job.phases))
        sender.send(Refused(problems=refused.problems))
        raise refused from error
    except Exception as error:
        if is_victim(error):
            # The controller names the rank whose error arrives first.
            threading.Event().wait(_VICTIMS_SECONDS)
        # Ray Train keeps the error while this process waits for the next group.
        free_frames(error)
        raise
    finally:
        sender.close()
        trace.close()


class WorkerSender(Sender):
    """Sender that drops results of aborted collectives, and notes progress.

    Args:
        channel: handle of the channel.
        rank: rank of the worker.
        trace: notes that this rank makes progress.
    """

    def __init__(self, channel: Any, *, rank: int, trace: HangTrace) -> None:
        super().__init__(channel, rank=rank)
        self.trace = trace

    @override
    def send(self, event: Event) -> None:
        self.trace.note_progress()
        if isinstance(event, StepRecord | Evaluated):
            # Results are sent before they are recorded, so no invalid result reaches the history.
            raise_if_aborted()
        super().send(event)


def _train(job: Job, sender: WorkerSender, closing: ExitStack) -> None:
    """Train from the newest state to the last step, or to the target.

    Args:
        job: the job.
        sender: sends events to the driver.
        closing: receives what to close at the end.
    """
    stopwatch, recipe, has_served = Stopwatch(), job.recipe, not _is_first_time("group")
    context = ray.train.get_context()
    spares = _affordable_spares(job, context)
    group = Membership.joined(context, recipe.parallel, has_served=has_served, spares=spares)
    # By default every worker would use all cores of the node.
    torch.set_num_threads(recipe.workers.threads or _count_threads(group.per_node))
    kinds = kinds_by_node(recipe)(group.nodes)
    trainer, stream = _build(job, group, kinds, stopwatch, closing)
    set_group_timeouts(recipe.workers.hang_seconds)
    resumed = get_resume_point()
    commit = _read_commit(job, resumed)
    # Only rank 0 reads and writes the run's history.
    number = broadcast_value(_number_attempt(job.run, commit, sender) if group.rank == 0 else None)
    _load_state(trainer, job, resumed, commit)
    if recipe.is_automatic:
        # Sizes that ran out of memory in an earlier attempt are not tried again.
        trainer.avoid(broadcast_value(_read_ran_out(job.run, sender) if group.rank == 0 else None))
    stopwatch.end_phase("state")
    held_out = HeldOutData(
        job.phases,
        job.held_out,
        recipe.evaluation,
        group.data,
        resumed.start.step,
        has_parent=job.parent is not None,
        kinds=kinds,
    )
    stopwatch.end_phase("held_out")
    reporter = Reporter(job.run, sender, attempt=number, rank=group.rank)
    with _make_manager(job, group, number, trainer, reporter) as manager:
        reporter.on_start(
            Started(
                attempt=number,
                world_size=group.world_size,
                step=resumed.start.step,
                state=resumed.tier,
                pids=group.pids,
                seconds=stopwatch.seconds,
                stayed=group.num_stayed,
                spare_bytes=sum(one.spares for one in group.members) * SPARE_BYTES,
            )
        )
        _send_layout_warnings(recipe, group, sender)
        if spares and _is_first_time("spares"):
            SparePool(spares, after=SPARES_AFTER_SECONDS)
        if commit and is_over(
            commit.step, commit.evaluation, steps=recipe.steps_in_all, target=recipe.target
        ):
            # The run is over, but its last state may be in memory only.
            if resumed.tier == "hot":
                manager.save_resumed(_to_saving(commit))
        else:
            pacing = PaceMonitor(
                group.places,
                group.data_ranks,
                deals=recipe.workers.speeds == "measured",
                tell=sender.send,
            )
            steps = trainer.train(
                stream,
                resumed.start,
                held_out=held_out,
                checkpoints=manager,
                reporter=reporter,
                target=recipe.target,
                on_times=pacing,
            )
            for step in steps:
                # Only rank 0 sends events of its steps.
                sender.trace.note_progress()
                for line in idle_rank_lines(step.record.speeds, step.record.batch_samples):
                    sender.send(Warned(text=line))
                if step.action >= Action.HALT and not step.is_last:
                    _wait_for_end(manager.halt(step.action), recipe.checkpoint.grace_seconds)
    ray.train.report({})


def _build(
    job: Job, group: Membership, kinds: RankKinds, stopwatch: Stopwatch, closing: ExitStack
) -> tuple[Trainer, RankStream]:
    """Build the trainer while this rank's stream opens; return both."""
    token_dtype = job.phases[0].batches.manifest.token_dtype
    with ThreadPoolExecutor(1) as background:
        parts = open_parts(
            ray.train.get_dataset_shard(STREAM),
            nodes=group.nodes,
            data_ranks=group.data_ranks,
            rank=group.rank,
            gather=lambda address: gather_from_ranks(address, group.world_size),
            closing=closing,
        )
        opening = background.submit(lambda: RankStream(parts(), token_dtype))
        stopwatch.end_phase("shard")
        trainer = Trainer(
            job.recipe,
            job.phases,
            group.device,
            world_size=group.world_size,
            per_node=group.per_node,
            place=group.data,
            kinds=kinds,
        )
        stopwatch.end_phase("model")
        stream = opening.result()
        stopwatch.end_phase("data")
    return trainer, stream


def _load_state(trainer: Trainer, job: Job, resumed: ResumePoint, commit: Commit | None) -> None:
    """Load the commit to resume from into the trainer, or initialise it."""
    if commit:
        trainer.restore(_checkpoint_storage(job, resumed), commit)
    else:
        trainer.begin(job.parent)


def _make_manager(
    job: Job, group: Membership, attempt: int, trainer: Trainer, reporter: Reporter
) -> CheckpointManager:
    return CheckpointManager(
        job.run,
        job.replicas,
        reporter,
        attempt=attempt,
        config=job.recipe.checkpoint,
        state=trainer.state,
        extra=trainer.extra,
        on_gpu=group.device.type == "cuda",
    )


def _send_layout_warnings(recipe: Recipe, group: Membership, sender: Sender) -> None:
    """Report tensor groups that are split over nodes, and each substitution that any rank makes for
    something that the recipe asks for."""
    if group.rank == 0 and (line := split_groups_warning(group.nodes, recipe.parallel.tensor)):
        sender.send(Warned(text=line))
    own_lines = missing_features(recipe, probe_capabilities(recipe, group.device))
    lines = (line for lines in gather_from_ranks(own_lines, group.world_size) for line in lines)
    for line in dict.fromkeys(lines):
        sender.send(Substituted(text=line))


def _affordable_spares(job: Job, context: TrainContext) -> int:
    """Return the number of spares that this process keeps: one for each worker of its node, if it
    is the first of them and the node has the memory."""
    wanted = context.get_local_world_size()
    if not job.recipe.workers.spares or context.get_local_rank() > 0:
        return 0
    if "spares" in _done_once:  # its spares already hold their memory
        return wanted
    free = spare_bytes()
    count = count_affordable(wanted, free)
    if not count and _is_first_time("short of memory"):
        text = (
            f"workers.spares: off on node {ray.util.get_node_ip_address()}: {wanted} idle "  # type: ignore[no-untyped-call]
            f"processes would take {wanted * SPARE_BYTES / 1e9:.1f} GB of {free / 1e9:.1f} GB that "
            "are free, and at most half of it is taken; a loss costs seconds more there"
        )
        send_event(job.channel, Warned(text=text))
    return count


def _is_first_time(action: str) -> bool:
    """Return True if this process has not done the action before, in any group; record it."""
    is_first = action not in _done_once
    _done_once.add(action)
    return is_first


def _checkpoint_storage(job: Job, resumed: ResumePoint) -> CommitStorage:
    return job.replicas if resumed.tier == "hot" and job.replicas else job.run.sub("checkpoints")


def _read_commit(job: Job, resumed: ResumePoint) -> Commit | None:
    """Return the commit that the run resumes from; None for a new run."""
    if resumed.commit is None:
        return None
    return Commit.from_json(
        _checkpoint_storage(job, resumed).read(resumed.commit, MARKER), resumed.commit
    )


def _number_attempt(run: Storage, commit: Commit | None, sender: Sender) -> int:
    """Return the number of this attempt; retry while storage fails."""
    return retry_storage_action(
        lambda: prepare_attempt(run, commit),
        "the run's history",
        lambda line: sender.send(Warned(text=line)),
    )


def _read_ran_out(run: Storage, sender: Sender) -> list[RanOut]:
    """Return the choices that ran out of memory in this run; retry while storage fails."""
    entries = retry_storage_action(
        lambda: history.read_driver_entries(run.sub("history"), "ran_out"),
        "the run's history",
        lambda line: sender.send(Warned(text=line)),
    )
    return [RanOut(group=e["group"], choice=e["choice"], text=e["text"]) for e in entries]


def _to_saving(commit: Commit) -> Saving:
    return Saving(
        step=commit.step, samples=commit.samples, tokens=commit.tokens, extra=commit.extra
    )


def _wait_for_end(request: ControlSignal, seconds: float) -> NoReturn:
    """Once the state is saved, end the run or wait until the group ends.

    Args:
        request: the signal that halted the workers.
        seconds: longest time to wait.

    Raises:
        Stopped: the run was asked to end.
        TimeoutError: the group was not ended in time.
        ReleasedError: this process may serve in the next group.
    """
    if request.action == Action.STOP:
        raise Stopped(request.text)
    if wait_for_release(seconds):
        raise ReleasedError
    raise TimeoutError(f"halted for a {request.reason}, but no other group of workers took over")


def _count_threads(local_world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


# -------------------------------------------------- the ranks of a group


class TrainContext(Protocol):
    """The part of Ray Train's context that a worker uses."""

    def get_world_rank(self) -> int:
        """Return the rank of this process."""

    def get_local_rank(self) -> int:
        """Return the rank of this process on its node."""

    def get_world_size(self) -> int:
        """Return the number of processes."""

    def get_local_world_size(self) -> int:
        """Return the number of processes on this node."""


@dataclass(frozen=True)
class Member:
    """One rank's process."""

    place: RankPlace
    pid: int
    has_served: bool
    """True if it was in a group before."""
    spares: int
    """Number of idle processes that it keeps on its node."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process among the ranks of its group."""

    rank: int
    local_rank: int
    world_size: int
    per_node: int
    """Ranks on this node."""
    parallel: ParallelConfig
    device: torch.device
    members: Sequence[Member]
    """The members by rank."""

    @classmethod
    def joined(
        cls, context: TrainContext, parallel: ParallelConfig, *, has_served: bool, spares: int
    ) -> Membership:
        """Return this process's membership of the group that Ray Train has started it in.
        Collective.

        Args:
            context: Ray Train's context.
            parallel: division of the model among the ranks.
            has_served: True if this process was in a group before.
            spares: idle processes that this one keeps on its node.
        """
        device = current_device()
        world_size = context.get_world_size()
        member = Member(_find_place(device), os.getpid(), has_served, spares)
        return cls(
            rank=context.get_world_rank(),
            local_rank=context.get_local_rank(),
            world_size=world_size,
            per_node=context.get_local_world_size(),
            parallel=parallel,
            device=device,
            members=gather_from_ranks(member, world_size),
        )

    @property
    def data(self) -> DataRank:
        """The part of every batch that this rank reads."""
        return self._data(self.rank)

    @cached_property
    def data_ranks(self) -> list[int]:
        """The data rank of every rank; ranks with the same one compute the same samples."""
        return [self._data(rank).rank for rank in range(self.world_size)]

    @property
    def places(self) -> list[RankPlace]:
        """The place of every rank."""
        return [member.place for member in self.members]

    @property
    def nodes(self) -> list[str]:
        """The node id of every rank."""
        return [place.node for place in self.places]

    @property
    def pids(self) -> Mapping[int, tuple[str, int]]:
        """Node id and process id of every rank."""
        return {rank: (one.place.node, one.pid) for rank, one in enumerate(self.members)}

    @property
    def num_stayed(self) -> int:
        """Number of processes that were in a group before."""
        return sum(member.has_served for member in self.members)

    def _data(self, rank: int) -> DataRank:
        return data_rank(rank, self.world_size, self.parallel.tensor, self.parallel.pipeline)


def gather_from_ranks(value: Any, world_size: int) -> list[Any]:
    """Gather every rank's value, by rank. Collective."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def _find_place(device: torch.device) -> RankPlace:
    """Return the node, host and device kind of this rank."""
    kind = device_name(device) if device.type == "cuda" else "CPU"
    node: str = ray.get_runtime_context().get_node_id()
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return RankPlace(node=node, host=host, device=kind)
