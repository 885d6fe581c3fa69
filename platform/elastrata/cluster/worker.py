"""The worker: what every member of the group does, from the first import to the last checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NoReturn

import ray.train
import ray.util
import torch
import torch.distributed as dist

from elastrata.checkpoints.commit import MARKER, Commit
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata.cluster.culprits import is_victim
from elastrata.cluster.event_sender import Sender, tell
from elastrata.cluster.job import Job
from elastrata.cluster.leaving import began, is_let_go, release
from elastrata.cluster.node_kinds import kinds_by_node
from elastrata.cluster.placement import split_line
from elastrata.cluster.prestarted import Spares
from elastrata.cluster.reaper import Reaper
from elastrata.cluster.source import resume_point
from elastrata.core.backoff import patiently
from elastrata.core.control_signal import Action, ControlSignal
from elastrata.core.device import DeviceCapabilities, current_device, device_name
from elastrata.core.ends import RanOutError, Stopped
from elastrata.core.events import RanOut, Refused, Started, Substituted, Warned
from elastrata.core.mesh import data_rank
from elastrata.core.stopwatch import Stopwatch
from elastrata.core.target import is_over
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.succession import take_over
from elastrata.trainer.attempt import agreed, attempt
from elastrata.trainer.checkpoint_manager import CheckpointManager
from elastrata.trainer.engine import looked_for, missing_here
from elastrata.trainer.held_out import HeldOut
from elastrata.trainer.newest_state import ResumePoint
from elastrata.trainer.out_of_memory import what_fits
from elastrata.trainer.pacing import Pacing, RankPlace, idle_ranks
from elastrata.trainer.saving import Saving
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import RankStream

STREAM = "train"
"""The name of the data set that Ray Train hands to the workers."""
SPARES_AFTER_SECONDS = 5.0
"""The imports of spare processes wait so long, to leave the first steps alone."""
_VICTIMS_SECONDS = 0.5
"""An error that another rank has caused waits so long, so that the controller hears of its cause
first."""
_come_to: set[str] = set()
"""What this process does once, though it serve in several groups."""


class LetGoError(Exception):
    """The group has ended, and this process may serve in the next one."""


def train_worker(config: dict[str, Any]) -> None:
    """Ray Train's entry point: `config["job"]` is the `Job`."""
    began()
    job: Job = config["job"]
    sender = Sender(job.channel, rank=ray.train.get_context().get_world_rank())
    try:
        _train(job, sender)
    except LetGoError:
        return
    except UserError as error:
        sender.send(Refused(problems=error.problems))
        raise
    except RanOutError as error:
        sender.send(error.told)
        raise
    except torch.OutOfMemoryError as error:
        refused = UserError(what_fits(job.recipe, job.phases))
        sender.send(Refused(problems=refused.problems))
        raise refused from error
    except Exception as error:
        if is_victim(error):
            Event().wait(_VICTIMS_SECONDS)
        release(error)
        raise
    finally:
        sender.close()


def _train(job: Job, sender: Sender) -> None:
    """Continues from the newest state to the last step, or to the target."""
    stopwatch, context, recipe = Stopwatch(), ray.train.get_context(), job.recipe
    if context.get_local_rank() == 0 and _is_first("reaper"):
        _start_reaper(recipe.workers.hang_seconds, job.channel)
    rank, world_size = context.get_world_rank(), context.get_world_size()
    per_node = context.get_local_world_size()
    data = data_rank(rank, world_size, recipe.parallel.tensor, recipe.parallel.pipeline)
    torch.set_num_threads(recipe.workers.threads or _fair_threads(per_node))
    device, token_dtype = current_device(), job.phases[0].batches.manifest.token_dtype
    members = _of_all_ranks((_place(device), os.getpid(), not _is_first("group")), world_size)
    kinds = kinds_by_node(recipe)([place.node for place, *_ in members])
    with ThreadPoolExecutor(1) as background:
        opening = background.submit(RankStream, ray.train.get_dataset_shard(STREAM), token_dtype)
        stopwatch.passed("shard")
        trainer = Trainer(
            recipe,
            job.phases,
            device,
            world_size=world_size,
            per_node=per_node,
            place=data,
            kinds=kinds,
        )
        stopwatch.passed("model")
        stream = opening.result()
        stopwatch.passed("data")
    resumed = resume_point()
    start, commit = resumed.start, _commit(job, resumed)
    number = agreed(_take_over(job.run, commit, sender) if rank == 0 else None)
    if commit:
        trainer.restore(_storage(job, resumed), commit)
    else:
        trainer.begin(job.parent)
    if recipe.is_automatic:
        trainer.avoid(agreed(_ran_out(job.run, sender) if rank == 0 else None))
    stopwatch.passed("state")
    held_out = HeldOut(
        job.phases,
        job.held_out,
        recipe.evaluation,
        data,
        start.step,
        has_parent=job.parent is not None,
        kinds=kinds,
    )
    stopwatch.passed("held_out")
    manager = CheckpointManager(
        job.run,
        job.replicas,
        attempt=number,
        rank=rank,
        config=recipe.checkpoint,
        channel=sender,
        state=trainer.state,
        extra=trainer.extra,
        on_gpu=device.type == "cuda",
    )
    started = Started(
        attempt=number,
        world_size=world_size,
        step=start.step,
        state=resumed.tier,
        pids={rank: (place.node, pid) for rank, (place, pid, _) in enumerate(members)},
        seconds=stopwatch.seconds,
        stayed=sum(has_served for _, _, has_served in members),
    )
    with manager:
        manager.started(started)
        placed = [started.pids[number][0] for number in range(world_size)]
        if rank == 0 and (line := split_line(placed, recipe.parallel.tensor)):
            sender.send(Warned(text=line))
        for line in _all_substitutions(recipe, looked_for(recipe, device), world_size):
            sender.send(Substituted(text=line))
        if recipe.workers.spares and context.get_local_rank() == 0 and _is_first("spares"):
            Spares(per_node, after=SPARES_AFTER_SECONDS)
        was_over = commit is not None and is_over(
            commit.step, commit.evaluation, steps=recipe.steps_in_all, target=recipe.target
        )
        steps = attempt(
            trainer,
            manager,
            held_out,
            stream,
            start,
            steps=recipe.steps_in_all,
            target=recipe.target,
            measured=_pacing([place for place, *_ in members], recipe, sender),
        )
        for step in () if was_over else steps:
            for line in idle_ranks(step.record.speeds, step.record.batch_samples):
                sender.send(Warned(text=line))
            if step.action >= Action.HALT and not step.is_last:
                _rest(manager.halted(step.action), recipe.checkpoint.grace_seconds)
        if commit and resumed.tier == "hot" and was_over:
            manager.continued(_saving(commit))
    ray.train.report({})


def _start_reaper(seconds: float, channel: Any) -> None:
    """Watches this node's processes, while this one lives."""
    job: str = ray.get_runtime_context().get_job_id()
    Reaper(os.getppid, job, seconds, lambda line: tell(channel, Warned(text=line)))


def _is_first(what: str) -> bool:
    """Whether this process, in whatever group, has not come to that before; from now on it has."""
    is_first = what not in _come_to
    _come_to.add(what)
    return is_first


def _storage(job: Job, resumed: ResumePoint) -> CommitStorage:
    return job.replicas if resumed.tier == "hot" and job.replicas else job.run.sub("checkpoints")


def _commit(job: Job, resumed: ResumePoint) -> Commit | None:
    """The commit that the run continues from; None for a new run."""
    if resumed.commit is None:
        return None
    return Commit.from_json(_storage(job, resumed).read(resumed.commit, MARKER), resumed.commit)


def _take_over(run: Storage, commit: Commit | None, sender: Sender) -> int:
    """The number of this attempt; waits for storage that fails."""
    return patiently(
        lambda: take_over(run, commit),
        "the run's history",
        lambda line: sender.send(Warned(text=line)),
    )


def _ran_out(run: Storage, sender: Sender) -> list[RanOut]:
    """The choices that ran out of memory in this run; waits for storage that fails."""
    entries = patiently(
        lambda: history.read_told(run.sub("history"), "ran_out"),
        "the run's history",
        lambda line: sender.send(Warned(text=line)),
    )
    return [RanOut(group=e["group"], choice=e["choice"], text=e["text"]) for e in entries]


def _saving(commit: Commit) -> Saving:
    return Saving(
        step=commit.step, samples=commit.samples, tokens=commit.tokens, extra=commit.extra
    )


def _rest(request: ControlSignal, seconds: float) -> NoReturn:
    """After the state is safe: ends the run, or waits until the group ends.

    Raises:
        Stopped: the run is to end.
        TimeoutError: nobody ended the group.
        LetGoError: this process may serve in the next one.
    """
    if request.action == Action.STOP:
        raise Stopped(request.text)
    if is_let_go(seconds):
        raise LetGoError
    raise TimeoutError(f"halted for a {request.reason}, but no other group of workers took over")


def _place(device: torch.device) -> RankPlace:
    """Where this rank computes."""
    kind = device_name(device) if device.type == "cuda" else "CPU"
    node: str = ray.get_runtime_context().get_node_id()
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return RankPlace(node=node, host=host, device=kind)


def _pacing(places: Sequence[RankPlace], recipe: Recipe, sender: Sender) -> Pacing:
    """A look at how fast all ranks are; the sender of rank 0 alone tells of it."""
    parallel, count = recipe.parallel, len(places)
    data = [
        data_rank(rank, count, parallel.tensor, parallel.pipeline).rank for rank in range(count)
    ]
    deals = recipe.workers.speeds == "measured"
    return Pacing(places, data, deals=deals, tell=sender.send)


def _all_substitutions(recipe: Recipe, here: DeviceCapabilities, world_size: int) -> list[str]:
    """Things that any rank uses instead of those the recipe asks for: each line once."""
    own = missing_here(recipe, here)
    return list(dict.fromkeys(line for lines in _of_all_ranks(own, world_size) for line in lines))


def _of_all_ranks(value: Any, world_size: int) -> list[Any]:
    """Every rank's value, by rank."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def _fair_threads(local_world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
