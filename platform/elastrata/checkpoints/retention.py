"""Retention: which commits are kept, and the removal of the others and of what never became one."""

from __future__ import annotations

import math

from elastrata.checkpoints.commit import MARKER, Commit, commits, folders
from elastrata.checkpoints.commit_storage import CommitStorage


def prune(storage: CommitStorage, *, keep_last: int, keep_best: bool) -> list[Commit]:
    """Removes old commits, and unfinished folders that are older than the newest commit.

    A folder that is being written now is safe: its attempt or its step is newer than that of any
    commit, and folders order by attempt, then step.

    Args:
        storage: the run's folder of checkpoints.
        keep_last: number of the newest commits that stay.
        keep_best: whether the commit with the smallest evaluation loss stays beside them.

    Returns:
        The commits that are gone.
    """
    found = commits(storage)
    if not found:
        return []
    kept = found[:keep_last]
    if keep_best and (best := best_commit(found)):
        kept.append(best)
    names = [str(name) for name in folders(storage)]
    for name in names[names.index(found[0].folder) :]:
        if name not in {commit.folder for commit in kept}:
            remove(storage, name)
    return [commit for commit in found if commit not in kept]


def best_commit(found: list[Commit]) -> Commit | None:
    """The commit with the smallest evaluation loss, the newest of equals; None without any."""
    evaluated = [
        (commit.evaluation_loss, commit)
        for commit in found
        if commit.evaluation_loss is not None and math.isfinite(commit.evaluation_loss)
    ]
    return min(evaluated, key=lambda pair: pair[0])[1] if evaluated else None


def remove(storage: CommitStorage, folder: str) -> None:
    """Deletes a commit's marker first, so that it stops to exist before it is incomplete."""
    storage.delete(folder, MARKER)
    storage.delete(folder)
