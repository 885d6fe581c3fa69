"""The checkpoint of a run that a user has chosen: to make something of, or to go back to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from elastrata.checkpoints.commit import Commit, commits, markers, problems
from elastrata.checkpoints.retention import best_commit
from elastrata.run import history
from elastrata.run.evidence import contradictions
from elastrata.run.history import (
    SET_ASIDE,
    HistoryWriter,
    PartName,
    part_names,
    read_lineage,
    read_part,
)
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage


def chosen_commit(run: Storage, wanted: str, key: str = "--checkpoint") -> Commit:
    """The checkpoint of a run that is meant by `newest`, `best`, a step, or its folder's name; its
    files are not looked at.

    Args:
        run: its folder.
        wanted: the choice.
        key: where a user has made it, for messages.

    Raises:
        UserError: there is none, or none that counts.
    """
    checkpoints, lineage = run.sub("checkpoints"), read_lineage(run.sub("history"))
    found = commits(checkpoints)
    if not found:
        raise UserError(f"{checkpoints.uri()}: the run has no checkpoint yet")
    counting = [commit for commit in found if lineage.counts(*commit.place)]
    if wanted in ("newest", "best") and not counting:
        raise UserError(*contradictions(run, found, lineage))
    if wanted == "newest":
        folder, newest = next(iter(markers(checkpoints).items()))
        if isinstance(newest, str):
            raise UserError(f"checkpoint {checkpoints.uri(folder)}: {newest}; {key} names one")
        return counting[0]
    if wanted == "best":
        best = best_commit(counting)
        if best is None:
            raise UserError(f"{checkpoints.uri()}: no checkpoint was evaluated; try 'newest'")
        return best
    by_folder = {commit.folder: commit for commit in found}
    if wanted in by_folder:
        return by_folder[wanted]
    by_step = {str(commit.step): commit for commit in (*reversed(found), *reversed(counting))}
    if wanted not in by_step:
        raise UserError(
            f"{key}: {wanted}: expected newest, best or one of the steps "
            f"{', '.join(sorted(by_step, key=int))}{_nearest(wanted, by_step)}"
        )
    return by_step[wanted]


def _nearest(wanted: str, by_step: dict[str, Commit]) -> str:
    """A hint at the step that is meant, or at the one next to it."""
    if not wanted.isdecimal():
        return nearest(wanted, [*by_step, "newest", "best"])
    step = min(map(int, by_step), key=lambda step: abs(step - int(wanted)))
    return f" (did you mean '{step}'?)"


def find_commit(run: Storage, wanted: str) -> Commit:
    """The checkpoint of a run that a user means.

    Args:
        run: its folder.
        wanted: the name of the checkpoint's folder, or its step.

    Raises:
        UserError: there is none, or it is damaged.
    """
    checkpoints = run.sub("checkpoints")
    saved = commits(checkpoints)
    named = {commit.folder: commit for commit in saved}
    named |= {str(commit.step): commit for commit in reversed(saved)}
    if not named:
        raise UserError(f"--from: {wanted}: {checkpoints.uri()} has no checkpoint")
    if wanted not in named:
        steps = ", ".join(map(str, sorted({commit.step for commit in saved})))
        raise UserError(
            f"--from: {wanted}: no such checkpoint{nearest(wanted, named)}; expected one of the "
            f"steps {steps}, or the name of a folder in {checkpoints.uri()}"
        )
    if damaged := problems(checkpoints, named[wanted]):
        raise UserError(f"--from: {checkpoints.uri(named[wanted].folder)}: {damaged[0]}")
    return named[wanted]


def go_back(run: Storage, commit: Commit, warn: Callable[[str], None]) -> None:
    """Makes the run go on from a checkpoint, and its history say so. Parts that cannot be read or
    do not belong to it are set aside, in a folder of their own.

    Args:
        run: its folder; this process owns it.
        commit: from `find_commit`.
        warn: called with a line for each part that is set aside.

    Raises:
        UserError: storage does not take it.
    """
    storage = run.sub("history")
    for name, why in _unfit(storage).items():
        _set_aside(storage, str(name))
        warn(f"{storage.uri(str(name))}: {why}; now in {storage.uri(SET_ASIDE)}")
    saved = max(other.place[0] for other in commits(run.sub("checkpoints")))
    number = max(history.next_attempt(storage), saved + 1)
    writer = HistoryWriter(storage, number, warn, writer="d")
    writer.add("returned", {"step": commit.step, "commit": commit.folder})
    writer.flush()
    if writer.unwritten()[1]:
        raise UserError(f"{storage.uri()}: cannot be written")


def _unfit(storage: Storage) -> dict[PartName, str]:
    """The parts that cannot stay, with the reason."""
    found: dict[PartName, str] = {}
    for name in part_names(storage):
        try:
            part = read_part(storage, name)
            if part.foreign_reason:
                found[name] = part.foreign_reason
            history.entries_of(storage, [part])
        except UserError as error:
            found[name] = error.problems[0].removeprefix(f"{storage.uri(str(name))}: ")
    return found


def _set_aside(storage: Storage, name: str) -> None:
    if not storage.is_local:
        storage.write(storage.read(name), SET_ASIDE, name)
        storage.delete(name)
        return
    target = Path(storage.path(SET_ASIDE, name))
    target.parent.mkdir(exist_ok=True)
    Path(storage.path(name)).rename(target)
