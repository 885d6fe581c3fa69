"""The evidence of a run, its history and its checkpoints, held against each other.

And the checkpoint that a user has chosen, to make something of or to go back to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrata.checkpoints.commit import (
    MARKER,
    Commit,
    FolderName,
    commits,
    folders,
    markers,
    problems,
    size_problems,
)
from elastrata.checkpoints.retention import best_commit
from elastrata.run import history
from elastrata.run.history import (
    FORKED,
    SET_ASIDE,
    History,
    HistoryWriter,
    Lineage,
    PartName,
    part_names,
    read_lineage,
    read_part,
    unwritten_entries,
)
from elastrata.run.ownership import look_at_driver
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
FROM = "elastrata train ... --from"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The files of a run, as far as a look at names, sizes and checksums of lines tells."""

    run: Storage
    history: History
    saved: tuple[Commit, ...]
    """Checkpoints with a readable marker, the newest first."""
    lineage: Lineage
    unreadable: tuple[str, ...]
    """A line for each checkpoint whose marker is damaged."""
    lost: tuple[str, ...]
    """A line for each checkpoint that is not there, though the run committed it and did not remove
    it, and for each one that lacks files or has cut ones."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each thing that is not as it was written."""
        return (*self.history.problems, *self._unrecorded(), *self.unreadable, *self.lost)

    def _unrecorded(self) -> Iterator[str]:
        """Yield a line if the history ends before the newest checkpoint: parts are lost."""
        newest = next(iter(self.counting), None)
        if newest is None:
            return
        try:
            entries = [*self.history.entries, *unwritten_entries(newest)]
        except UserError as error:
            yield str(error)
            return
        steps = {entry["step"] for entry in entries if entry["kind"] == "step"}
        last = max((entry.get("step", 0) for entry in self.history.entries), default=0)
        if newest.step > last and not set(range(last + 1, newest.step + 1)) <= steps:
            yield (
                f"{self.run.uri('history')}: ends with step {last}, before checkpoint "
                f"{newest.folder} of step {newest.step}"
            )

    @property
    def counting(self) -> list[Commit]:
        """The checkpoints that the run has not gone back behind, the newest first."""
        return [commit for commit in self.saved if self.lineage.counts(*commit.place)]


def evidence(run: Storage) -> Evidence:
    """Looks at a run's folder.

    Raises:
        UserError: its history was altered so that it cannot be read.
    """
    checkpoints = run.sub("checkpoints")
    marked = markers(checkpoints)  # before the history: what they know of it is there by then
    damaged = _damaged(checkpoints, marked)
    saved = tuple(one for one in marked.values() if isinstance(one, Commit))
    found = history.look(run.sub("history"))
    lineage = Lineage()
    for entry in found.entries:
        lineage.event(entry)
    lost = _lost(checkpoints, marked, damaged, found.entries, lineage)
    if lost:
        # A run that goes on may have saved or removed some between the two looks. It notes that it
        # removes one before it does: what is lost is so in a second look, and the history after it.
        marked_now = markers(checkpoints)
        damaged_now = _damaged(checkpoints, marked_now)
        now = history.read(run.sub("history"))
        lost_now = _lost(checkpoints, marked_now, damaged_now, now, lineage)
        lost = {folder: why for folder, why in lost_now.items() if folder in lost}
    return Evidence(
        run=run,
        history=found,
        saved=saved,
        lineage=lineage,
        unreadable=tuple(
            f"checkpoint {checkpoints.uri(folder)}: {why}"
            for folder, why in marked.items()
            if isinstance(why, str)
        ),
        lost=tuple(f"checkpoint {checkpoints.uri(folder)}: {why}" for folder, why in lost.items()),
    )


def kept_commits(entries: Sequence[Entry]) -> list[str]:
    """Return the folders of the checkpoints that must be there by a history: committed, and removed
    by no one who said so. Histories of earlier versions name none."""
    kept: dict[str, None] = {}
    is_old = any(entry["kind"] == "started" and "clock" not in entry for entry in entries)
    for entry in entries:
        if entry["kind"] == "committed":
            kept[entry["commit"]] = None
        elif entry["kind"] == FORKED and not is_old and (of_parent := _parse(entry["commit"])):
            kept[str(FolderName(entry["attempt"], of_parent.step, of_parent.token))] = None
    removed = _removed(entries)
    return [folder for folder in kept if folder not in removed]


def note_removal(run: Storage, warn: Callable[[str], None]) -> bool:
    """Notes in a run's history that all its checkpoints are to go.

    Args:
        run: its folder; no process trains it.
        warn: called with a line where storage does not take that.

    Returns:
        Whether it is noted, so that they may go.
    """
    going = [str(name) for name in folders(run.sub("checkpoints"))]
    storage = run.sub("history")
    writer = HistoryWriter(storage, max(1, history.next_attempt(storage) - 1), warn, writer="d")
    if going:
        writer.add("removed", {"commits": going})
    return writer.flush()


def _damaged(checkpoints: Storage, marked: Mapping[str, Commit | str]) -> dict[str, str]:
    """By folder, what a checkpoint with a readable marker lacks."""
    found = {}
    for folder, commit in marked.items():
        if isinstance(commit, Commit) and (wrong := size_problems(checkpoints, commit)):
            found[folder] = wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else "")
    return found


def _lost(
    checkpoints: Storage,
    marked: Mapping[str, Commit | str],
    damaged: Mapping[str, str],
    entries: Sequence[Entry],
    lineage: Lineage,
) -> dict[str, str]:
    """By folder, why a checkpoint that must be there is not there, or not whole. Those that the run
    has gone back behind need not be."""
    there = {str(name) for name in folders(checkpoints)}
    kept = [name for folder in kept_commits(entries) if (name := _parse(folder))]
    missing = {
        str(name): f"{MARKER} is missing"
        if str(name) in there
        else "missing, though the history has it as committed and not as removed"
        for name in kept
        if str(name) not in marked
    }
    removed = _removed(entries)
    found = missing | {folder: why for folder, why in damaged.items() if folder not in removed}
    return {folder: why for folder, why in found.items() if _counts(lineage, folder)}


def _removed(entries: Sequence[Entry]) -> set[str]:
    lists = (entry["commits"] for entry in entries if entry["kind"] == "removed")
    return {folder for commits in lists for folder in commits}


def _counts(lineage: Lineage, folder: str) -> bool:
    name = _parse(folder)
    return name is not None and lineage.counts(name.attempt, name.step)


def _parse(folder: object) -> FolderName | None:
    return FolderName.parse(folder) if isinstance(folder, str) else None


def is_begun(run: Storage) -> bool:
    """Whether workers have left something in a run's folder."""
    names = part_names(run.sub("history"))
    return bool(markers(run.sub("checkpoints"))) or any(not name.writer for name in names)


def check_continuation(run: Storage, warn: Callable[[str], None]) -> None:
    """Looks whether a run can go on by itself. Writes nothing.

    Args:
        run: its folder.
        warn: called with a line for each thing that is not as it was written and does not hinder.

    Raises:
        UserError: its history cannot be read, holds what does not belong to it, or contradicts all
            checkpoints; or no checkpoint is whole. A run that has checkpoints never begins anew.
    """
    found = evidence(run)
    if found.history.foreign:
        advice = _advice(found.saved)
        raise UserError(*(f"{line}; {advice}" for line in found.history.foreign))
    if found.saved and not found.counting:
        raise UserError(*contradictions(run, found.saved, found.lineage))
    for line in found.problems:
        warn(line)
    start = _start(found)
    steps = history.effective_steps(found.history.entries)
    driver = look_at_driver(run)
    heard = driver.newest.step if driver.newest and not driver.released else 0
    last = steps[-1]["step"] if steps else 0
    if max(last, heard) > start:
        first = (
            f"from step {start + 1}" if start else "from the first step, as no checkpoint is there"
        )
        more = f", and its driver had heard of step {heard}" if heard > last else ""
        warn(f"goes on {first}; the history has steps up to {last}{more}")


def contradictions(
    run: Storage, saved: tuple[Commit, ...] | list[Commit], lineage: Lineage
) -> list[str]:
    """Why none of a run's checkpoints counts, a line for each."""
    return [
        f"checkpoint {run.uri('checkpoints', commit.folder)}: does not count: by the history "
        f"attempt {event.attempt} went on from step {event.step}, and no checkpoint of that is "
        f"left; {FROM} {commit.step} goes on from this one"
        for commit in saved
        if (event := lineage.contradiction(*commit.place))
    ]


def _start(found: Evidence) -> int:
    """The step of the newest checkpoint that looks whole; 0: there is none at all.

    Raises:
        UserError: there are some, but none is whole.
    """
    checkpoints = found.run.sub("checkpoints")
    damaged = []
    for commit in found.counting:
        wrong = size_problems(checkpoints, commit)
        if not wrong:
            return commit.step
        damaged.append(f"checkpoint {checkpoints.uri(commit.folder)}: {wrong[0]}")
    if damaged or found.unreadable:
        raise UserError(*damaged, *found.unreadable)
    return 0


def _advice(saved: tuple[Commit, ...]) -> str:
    if not saved:
        return "move it away"
    return f"move it away, or {FROM} {saved[0].step} goes on from that checkpoint without it"


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
