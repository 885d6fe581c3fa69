"""The newest state of a run: in memory or on storage, never one that the run has gone back behind.

A state may be out of reach for a while, so that a group of workers continues from an older one.
From then on the run is what that group makes of it, and the newer state counts no more.
"""

from __future__ import annotations

from collections.abc import Callable

from elastrata.checkpoints.commit import Commit, commits, newest_verified
from elastrata.checkpoints.commit_storage import CommitStorage
from elastrata.replicas.storage import newest_replica
from elastrata.run import history
from elastrata.run.evidence import contradictions
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


def newest_state(run: Storage, hot: CommitStorage | None, warn: Callable[[str], None]) -> Start:
    """Where the next group of workers begins.

    Args:
        run: the run's folder.
        hot: where copies in memory are; None: nowhere.
        warn: called with one line for every checkpoint that had to be passed over.

    Raises:
        UserError: there are checkpoints, but none is whole, or none counts: a run that has some
            never begins anew by itself.
        Exception: storage does not answer.
    """
    checkpoints = run.sub("checkpoints")
    lineage = history.read_lineage(run.sub("history"))
    saved = commits(checkpoints)
    counting = [commit.place for commit in saved if lineage.counts(*commit.place)]
    copy = newest_replica(hot, lineage.counts) if hot else None
    if copy and copy.place >= max(counting, default=(0, 0)):
        return _start(copy, "hot")
    if saved and not counting:
        raise UserError(*contradictions(run, saved, lineage))
    durable = newest_verified(checkpoints, warn, lineage.counts)
    return _start(durable, "durable") if durable else Start()


def _start(commit: Commit, tier: str) -> Start:
    return Start(
        step=commit.step,
        samples=commit.samples,
        tokens=commit.tokens,
        commit=commit.folder,
        tier=tier,
    )
