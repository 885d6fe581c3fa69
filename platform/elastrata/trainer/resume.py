"""The state that a group of workers resumes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastrata.checkpoints.commit import Commit, CommitStorage, commits, newest_verified
from elastrata.checkpoints.replicas.replicas import newest_replica
from elastrata.run import history
from elastrata.run.consistency import contradictions
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state that a group of workers begins from. A value: it can be sent to any process."""

    start: Start = field(default_factory=Start)
    """How far the run is in it."""
    commit: str | None = None
    """Name of the checkpoint that holds it; None: a new run."""
    tier: str = "new"
    """Where that checkpoint is: `durable` storage, or `hot`, in the memory of other processes."""


def start_after(commit: Commit | None) -> Start:
    """How far a run is in the state of that checkpoint; None: a new run."""
    if commit is None:
        return Start()
    return Start(step=commit.step, samples=commit.samples, tokens=commit.tokens)


def newest_state(
    run: Storage, replicas: CommitStorage | None, warn: Callable[[str], None]
) -> ResumePoint:
    """The state that the next group of workers begins from.

    Args:
        run: the run's folder.
        replicas: where copies in memory are; None: nowhere.
        warn: called with one line for every checkpoint that had to be passed over, and where their
            folder is none, as long as there is a copy in memory.

    Raises:
        UserError: there are checkpoints, but none is whole, or none counts: a run that has some
            never begins anew by itself. Or their folder is none.
        Exception: storage does not answer.
    """
    checkpoints = run.sub("checkpoints")
    lineage = history.read_lineage(run.sub("history"))
    copy = newest_replica(replicas, lineage.counts) if replicas else None
    try:
        saved = commits(checkpoints)
    except UserError as error:
        if copy is None:
            raise
        warn(str(error))
        return _at(copy, "hot")
    counting = [commit.place for commit in saved if lineage.counts(*commit.place)]
    if copy and copy.place >= max(counting, default=(0, 0)):
        return _at(copy, "hot")
    if saved and not counting:
        raise UserError(*contradictions(run, saved, lineage))
    durable = newest_verified(checkpoints, warn, lineage.counts)
    return _at(durable, "durable") if durable else ResumePoint()


def _at(commit: Commit, tier: str) -> ResumePoint:
    return ResumePoint(start=start_after(commit), commit=commit.folder, tier=tier)
