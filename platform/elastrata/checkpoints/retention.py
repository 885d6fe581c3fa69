"""Interval and retention of checkpoints, and removal of old and unfinished ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from elastrata.checkpoints.commit import MARKER, Commit, CommitStorage, list_commits, list_folders
from elastrata.config import Config


class CheckpointConfig(Config):
    """Interval and retention of checkpoints."""

    every: Annotated[int, Field(gt=0, le=10**9)] = 500
    """Steps between checkpoints."""
    keep_last: Annotated[int, Field(gt=0, le=10**6)] = 2
    """Number of newest checkpoints to keep. 2 or more: the run can resume if the newest is
    damaged."""
    keep_best: bool = True
    """Whether to also keep the checkpoint with the smallest evaluation loss. Only evaluated steps
    compete: make `every` a multiple of `evaluation.every`."""
    keep_every: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Also keep the first checkpoint at or after each multiple of this many steps, for forks and
    averages. A multiple of `every`. Default: none."""
    keep_steps: Annotated[
        tuple[Annotated[int, Field(gt=0, le=10**12)], ...], Field(max_length=10_000)
    ] = ()
    """Also keep the first checkpoint at or after each of these steps, multiples of `every`."""
    hot_steps: Annotated[int, Field(ge=0, le=10**9)] = 20
    """Maximum steps lost with a worker; 0: no in-memory checkpoints. They are made twice in this
    many steps, on GPUs more often if cheap. If one is over 5 s late, the next is skipped, which
    costs more steps."""
    hot_bytes: Annotated[int, Field(gt=0, le=2**50)] = 16 * 2**30
    """Maximum bytes of in-memory checkpoints per node. A larger state has none."""
    grace_seconds: Annotated[float, Field(gt=0, le=1e9)] = 60.0
    """Seconds that a planned change (resize, drain, Ctrl-C) waits for its checkpoint."""

    @property
    def hot_every(self) -> int:
        """Largest number of steps between in-memory checkpoints. A new one waits up to five seconds
        for the previous one, so at most two intervals are lost if the copies arrive."""
        return max(1, self.hot_steps // 2)


def prune(
    storage: CommitStorage,
    *,
    keep_last: int,
    keep_best: bool,
    keep_every: int | None = None,
    keep_steps: Sequence[int] = (),
    before_removal: Callable[[Sequence[str]], None] = lambda _: None,
) -> list[Commit]:
    """Remove old commits, and unfinished folders that are older than the newest commit.

    A folder that is being written is safe: it has a later attempt or step than any commit, and
    folders are ordered by attempt, then step.

    Args:
        storage: the run's folder of checkpoints.
        keep_last: number of newest commits to keep.
        keep_best: whether to keep the commit with the smallest evaluation loss, too.
        keep_every: also keep the first commit at or after each multiple of this many steps, as a
            slow save delays the next one; None: none.
        keep_steps: also keep the first commit at or after each of these steps.
        before_removal: called with the folders to remove, if any; nothing is removed if it raises.

    Returns:
        The removed commits.
    """
    found = list_commits(storage)
    if not found:
        return []
    kept = found[:keep_last]
    # It may be among the newest already, so `kept` may hold it twice.
    if keep_best and (best := best_commit(found)):
        kept.append(best)
    # Of a step that was repeated after a fault, the newest commit.
    by_step = {commit.step: commit for commit in reversed(found)}
    for wanted in keep_steps:
        kept += [by_step[step] for step in sorted(by_step) if step >= wanted][:1]
    if keep_every:
        first = {step // keep_every: by_step[step] for step in sorted(by_step, reverse=True)}
        kept += [commit for interval, commit in first.items() if interval]
    names = [str(name) for name in list_folders(storage)]
    staying = {commit.folder for commit in kept}
    # Newest first: what follows the newest commit is older, so no live attempt writes to it.
    going = [name for name in names[names.index(found[0].folder) :] if name not in staying]
    if going:
        before_removal(going)
    for name in going:
        remove(storage, name)
    return [commit for commit in found if commit not in kept]


def best_commit(found: list[Commit]) -> Commit | None:
    """Return the commit with the smallest evaluation loss, the newest if equal; None without
    any."""
    # NaN compares with no loss, and an infinite one could stay the best for ever.
    evaluated = [
        (commit.evaluation_loss, commit)
        for commit in found
        if commit.evaluation_loss is not None and math.isfinite(commit.evaluation_loss)
    ]
    return min(evaluated, key=lambda pair: pair[0])[1] if evaluated else None


def remove(storage: CommitStorage, folder: str) -> None:
    """Delete a commit's folder, its marker first, so that it never looks complete while it is
    not."""
    storage.delete(folder, MARKER)
    storage.delete(folder)
