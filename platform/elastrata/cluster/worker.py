"""The worker: what every member of the group does, from the first import to the last checkpoint."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, NoReturn

import ray.train
import torch

from elastrata.checkpoints.commit import MARKER, Commit, CommitStorage
from elastrata.cluster.culprits import is_victim
from elastrata.cluster.event_sender import Sender
from elastrata.cluster.job import Job
from elastrata.cluster.leaving import began, is_let_go, release
from elastrata.cluster.membership import Membership, of_all_ranks
from elastrata.cluster.node_kinds import kinds_by_node
from elastrata.cluster.placement import split_line
from elastrata.cluster.prestarted import Spares
from elastrata.cluster.source import resume_point
from elastrata.core.events import (
    Action,
    ControlSignal,
    RanOut,
    RanOutError,
    Refused,
    Started,
    Stopped,
    Substituted,
    Warned,
)
from elastrata.core.record import Stopwatch
from elastrata.core.target import is_over
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.history import take_over
from elastrata.trainer.attempt import agreed, attempt
from elastrata.trainer.autotune import what_fits
from elastrata.trainer.checkpoint_manager import CheckpointManager, Saving
from elastrata.trainer.engine import looked_for, missing_here
from elastrata.trainer.evaluation import HeldOut
from elastrata.trainer.pacing import Pacing, idle_ranks
from elastrata.trainer.resume import ResumePoint
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.retry import patiently
from elastrata_pipelines.speeds import RankKinds
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
    stopwatch, recipe, has_served = Stopwatch(), job.recipe, not _is_first("group")
    context = ray.train.get_context()
    group = Membership.joined(context, recipe.parallel, has_served=has_served)
    torch.set_num_threads(recipe.workers.threads or _fair_threads(group.per_node))
    kinds = kinds_by_node(recipe)(group.nodes)
    trainer, stream = _built(job, group, kinds, stopwatch)
    resumed = resume_point()
    commit = _commit(job, resumed)
    number = agreed(_take_over(job.run, commit, sender) if group.rank == 0 else None)
    _load(trainer, job, resumed, commit)
    if recipe.is_automatic:
        trainer.avoid(agreed(_ran_out(job.run, sender) if group.rank == 0 else None))
    stopwatch.passed("state")
    held_out = HeldOut(
        job.phases,
        job.held_out,
        recipe.evaluation,
        group.data,
        resumed.start.step,
        has_parent=job.parent is not None,
        kinds=kinds,
    )
    stopwatch.passed("held_out")
    with _manager(job, group, number, trainer, sender) as manager:
        manager.started(
            Started(
                attempt=number,
                world_size=group.world_size,
                step=resumed.start.step,
                state=resumed.tier,
                pids=group.pids,
                seconds=stopwatch.seconds,
                stayed=group.num_stayed,
            )
        )
        _tell_of_layout(recipe, group, sender)
        if recipe.workers.spares and group.local_rank == 0 and _is_first("spares"):
            Spares(group.per_node, after=SPARES_AFTER_SECONDS)
        if commit and is_over(
            commit.step, commit.evaluation, steps=recipe.steps_in_all, target=recipe.target
        ):
            if resumed.tier == "hot":
                manager.continued(_saving(commit))
        else:
            pacing = Pacing(
                group.places,
                group.data_ranks,
                deals=recipe.workers.speeds == "measured",
                tell=sender.send,
            )
            steps = attempt(
                trainer,
                manager,
                held_out,
                stream,
                resumed.start,
                steps=recipe.steps_in_all,
                target=recipe.target,
                measured=pacing,
            )
            for step in steps:
                for line in idle_ranks(step.record.speeds, step.record.batch_samples):
                    sender.send(Warned(text=line))
                if step.action >= Action.HALT and not step.is_last:
                    _rest(manager.halted(step.action), recipe.checkpoint.grace_seconds)
    ray.train.report({})


def _built(
    job: Job, group: Membership, kinds: RankKinds, stopwatch: Stopwatch
) -> tuple[Trainer, RankStream]:
    """The trainer, and this rank's stream, which opens meanwhile."""
    token_dtype = job.phases[0].batches.manifest.token_dtype
    with ThreadPoolExecutor(1) as background:
        opening = background.submit(RankStream, ray.train.get_dataset_shard(STREAM), token_dtype)
        stopwatch.passed("shard")
        trainer = Trainer(
            job.recipe,
            job.phases,
            group.device,
            world_size=group.world_size,
            per_node=group.per_node,
            place=group.data,
            kinds=kinds,
        )
        stopwatch.passed("model")
        stream = opening.result()
        stopwatch.passed("data")
    return trainer, stream


def _load(trainer: Trainer, job: Job, resumed: ResumePoint, commit: Commit | None) -> None:
    """Gives the trainer the state that it goes on from, or begins with."""
    if commit:
        trainer.restore(_storage(job, resumed), commit)
    else:
        trainer.begin(job.parent)


def _manager(
    job: Job, group: Membership, attempt: int, trainer: Trainer, sender: Sender
) -> CheckpointManager:
    return CheckpointManager(
        job.run,
        job.replicas,
        attempt=attempt,
        rank=group.rank,
        config=job.recipe.checkpoint,
        channel=sender,
        state=trainer.state,
        extra=trainer.extra,
        on_gpu=group.device.type == "cuda",
    )


def _tell_of_layout(recipe: Recipe, group: Membership, sender: Sender) -> None:
    """Sends a line where tensor groups are split over nodes, and for each thing that any rank uses
    instead of the one that the recipe asks for."""
    if group.rank == 0 and (line := split_line(group.nodes, recipe.parallel.tensor)):
        sender.send(Warned(text=line))
    own = missing_here(recipe, looked_for(recipe, group.device))
    lines = (line for lines in of_all_ranks(own, group.world_size) for line in lines)
    for line in dict.fromkeys(lines):
        sender.send(Substituted(text=line))


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


def _fair_threads(local_world_size: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)
