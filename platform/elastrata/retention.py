"""Retention: which commits are kept, and the removal of the others and of what never became one."""

from __future__ import annotations

import math

from elastrata.commit import MARKER, Commit, FolderName, commits, folders
from elastrata_pipelines.storage import Storage


def prune(storage: Storage, keep_last: int, keep_best: bool) -> None:
    """Removes old commits, and unfinished folders that are older than the newest commit.

    A folder that is being written now is safe: its attempt or its step is newer than that of any
    commit, and folder names order by attempt, then step.

    Args:
        storage: the run's folder of checkpoints.
        keep_last: number of the newest commits that stay.
        keep_best: whether the commit with the smallest evaluation loss stays beside them.
    """
    found = commits(storage)
    if not found:
        return
    keep = {commit.folder for commit in found[:keep_last]}
    if keep_best and (best := best_commit(found)):
        keep.add(best.folder)
    newest = FolderName.parse(found[0].folder)
    for folder in folders(storage):
        if folder not in keep and FolderName.parse(folder) < newest:
            remove(storage, folder)


def best_commit(found: list[Commit]) -> Commit | None:
    """The commit with the smallest evaluation loss, the newest of equals; None without any."""
    evaluated = [
        (commit.evaluation_loss, commit)
        for commit in found
        if commit.evaluation_loss is not None and math.isfinite(commit.evaluation_loss)
    ]
    return min(evaluated, key=lambda pair: pair[0])[1] if evaluated else None


def remove(storage: Storage, folder: str) -> None:
    """Deletes a commit's marker first, so that it stops to exist before it is incomplete."""
    storage.delete(folder, MARKER)
    storage.delete(folder)
