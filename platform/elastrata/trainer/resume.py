"""The state that a group of workers resumes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastrata.checkpoints.commit import Commit, CommitStorage, find_newest_verified, list_commits
from elastrata.checkpoints.replicas.replicas import find_newest_replica
from elastrata.run import history
from elastrata.run.consistency import contradictions
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The state that a group of workers resumes from. Can be pickled and sent to any process."""

    start: Start = field(default_factory=Start)
    """Progress of the run at that state."""
    commit: str | None = None
    """Name of the checkpoint's folder; None for a new run."""
    tier: str = "new"
    """Tier of the checkpoint: `durable` storage, `hot` (in-memory), or `new` without one."""


def start_after(commit: Commit | None) -> Start:
    """Return the progress of a run at a checkpoint; None stands for a new run."""
    if commit is None:
        return Start()
    return Start(step=commit.step, samples=commit.samples, tokens=commit.tokens)


def find_resume_point(
    run: Storage, replicas: CommitStorage | None, warn: Callable[[str], None]
) -> ResumePoint:
    """Return the state that the next group of workers resumes from.

    Args:
        run: the run's folder.
        replicas: in-memory checkpoints; None if there are none.
        warn: called with one line for every checkpoint that is skipped, and if the folder of
            checkpoints is invalid but an in-memory checkpoint exists.

    Raises:
        UserError: the folder of checkpoints is invalid, or it has checkpoints but none is intact,
            or none belongs to the run's history. A run with checkpoints never starts from zero by
            itself.
        Exception: storage does not answer.
    """
    checkpoints = run.sub("checkpoints")
    lineage = history.read_lineage(run.sub("history"))
    # Searched first, because it decides whether an invalid folder of checkpoints is an error.
    copy = find_newest_replica(replicas, lineage.counts) if replicas else None
    try:
        saved = list_commits(checkpoints)
    except UserError as error:
        if copy is None:
            raise
        warn(str(error))
        return _resume_at(copy, "hot")
    counting = [commit.place for commit in saved if lineage.counts(*commit.place)]
    # A tie goes to the in-memory checkpoint, which loads faster.
    if copy and copy.place >= max(counting, default=(0, 0)):
        return _resume_at(copy, "hot")
    # Checkpoints outside the history: a new start would silently discard them.
    if saved and not counting:
        raise UserError(*contradictions(run, saved, lineage))
    durable = find_newest_verified(checkpoints, warn, lineage.counts)
    return _resume_at(durable, "durable") if durable else ResumePoint()


def _resume_at(commit: Commit, tier: str) -> ResumePoint:
    return ResumePoint(start=start_after(commit), commit=commit.folder, tier=tier)
