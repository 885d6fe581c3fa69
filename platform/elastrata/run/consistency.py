"""Cross-checks of a run's history and checkpoints, and the user's choice of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrata.checkpoints.commit import (
    MARKER,
    Commit,
    FolderName,
    file_problems,
    list_commits,
    list_folders,
    read_markers,
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
from elastrata.run.ownership import read_driver
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
FROM = "elastrata train ... --from"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The files of a run, checked by names, sizes and checksums of history lines."""

    run: Storage
    history: History
    saved: tuple[Commit, ...]
    """Checkpoints with a readable marker, newest first."""
    lineage: Lineage
    unreadable: tuple[str, ...]
    """One line for each checkpoint whose marker is damaged."""
    lost: tuple[str, ...]
    """One line for each checkpoint that was committed and not removed but is missing, and for each
    one with missing or truncated files."""

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each problem."""
        return (*self.history.problems, *self._check_end(), *self.unreadable, *self.lost)

    def _check_end(self) -> Iterator[str]:
        """Yield a line if the history ends before the newest checkpoint, as parts are lost."""
        newest = next(iter(self.current_commits), None)
        if newest is None:
            return
        try:
            entries = [*self.history.entries, *unwritten_entries(newest)]
        except UserError as error:
            # Without these lines, the steps of the checkpoint are unknown.
            yield str(error)
            return
        steps = {entry["step"] for entry in entries if entry["kind"] == "step"}
        last = max((entry.get("step", 0) for entry in self.history.entries), default=0)
        # The lines that travel in the commit are written by the next attempt: they are not lost.
        if newest.step > last and not set(range(last + 1, newest.step + 1)) <= steps:
            yield (
                f"{self.run.uri('history')}: ends with step {last}, before checkpoint "
                f"{newest.folder} of step {newest.step}"
            )

    @property
    def current_commits(self) -> list[Commit]:
        """The checkpoints that the run has not gone back behind, newest first."""
        return [commit for commit in self.saved if self.lineage.counts(*commit.place)]


def read_evidence(run: Storage) -> Evidence:
    """Check the files of a run.

    Raises:
        UserError: the history was altered and cannot be read.
    """
    checkpoints = run.sub("checkpoints")
    # Read before the history: then the history knows every checkpoint found here.
    marked = read_markers(checkpoints)
    damaged = _find_damaged(checkpoints, marked)
    saved = tuple(one for one in marked.values() if isinstance(one, Commit))
    found = history.read_history(run.sub("history"))
    lineage = Lineage()
    for entry in found.entries:
        lineage.event(entry)
    lost = _find_lost(checkpoints, marked, damaged, found.entries, lineage)
    if lost:
        # A running job may have saved or removed checkpoints between the two reads. It records a
        # removal before it removes: a checkpoint is lost only if a second read, followed by the
        # history, shows the same.
        marked_now = read_markers(checkpoints)
        damaged_now = _find_damaged(checkpoints, marked_now)
        entries_now = history.read_entries(run.sub("history"))
        lost_now = _find_lost(checkpoints, marked_now, damaged_now, entries_now, lineage)
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


def expected_commits(entries: Sequence[Entry]) -> list[str]:
    """Return the folders of checkpoints that must exist: committed and not removed, by the history.

    Histories of earlier versions record neither.
    """
    kept: dict[str, None] = {}
    # Entries without `clock` are of earlier versions, which did not record commits.
    is_old = any(entry["kind"] == "started" and "clock" not in entry for entry in entries)
    for entry in entries:
        if entry["kind"] == "committed":
            kept[entry["commit"]] = None
        # A fork begins with a copy of the parent's checkpoint, under the fork's attempt number.
        elif (
            entry["kind"] == FORKED and not is_old and (of_parent := _parse_folder(entry["commit"]))
        ):
            kept[str(FolderName(entry["attempt"], of_parent.step, of_parent.token))] = None
    removed = _find_removed(entries)
    return [folder for folder in kept if folder not in removed]


def note_removal(run: Storage, warn: Callable[[str], None]) -> bool:
    """Record in the history that all checkpoints of a run will be removed.

    Args:
        run: the run's folder; no process trains it.
        warn: called with one line if storage rejects the entry.

    Returns:
        Whether the removal is recorded, so that the checkpoints may be removed.
    """
    removed_folders = [str(name) for name in list_folders(run.sub("checkpoints"))]
    storage = run.sub("history")
    # Written under the newest attempt's number, so that no new attempt begins.
    writer = HistoryWriter(storage, max(1, history.next_attempt(storage) - 1), warn, writer="d")
    if removed_folders:
        writer.add("removed", {"commits": removed_folders})
    return writer.flush()


def _find_damaged(checkpoints: Storage, marked: Mapping[str, Commit | str]) -> dict[str, str]:
    """Return, by folder, the damage of checkpoints that have a readable marker."""
    found = {}
    for folder, commit in marked.items():
        if isinstance(commit, Commit) and (wrong := size_problems(checkpoints, commit)):
            found[folder] = wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else "")
    return found


def _find_lost(
    checkpoints: Storage,
    marked: Mapping[str, Commit | str],
    damaged: Mapping[str, str],
    entries: Sequence[Entry],
    lineage: Lineage,
) -> dict[str, str]:
    """Return, by folder, why a checkpoint that must exist is missing or incomplete."""
    existing_folders = {str(name) for name in list_folders(checkpoints)}
    kept_names = [name for folder in expected_commits(entries) if (name := _parse_folder(folder))]
    # Of a checkpoint without a marker, the folder may still be there.
    missing = {
        str(name): f"{MARKER} is missing"
        if str(name) in existing_folders
        else "missing, although the history says that it was committed and not removed"
        for name in kept_names
        if str(name) not in marked
    }
    removed = _find_removed(entries)
    # A removal deletes files one by one: a kill in between leaves an incomplete folder.
    found = missing | {folder: why for folder, why in damaged.items() if folder not in removed}
    return {folder: why for folder, why in found.items() if _is_counting(lineage, folder)}


def _find_removed(entries: Sequence[Entry]) -> set[str]:
    """Return the folders of checkpoints that the run has removed."""
    lists = (entry["commits"] for entry in entries if entry["kind"] == "removed")
    return {folder for commits in lists for folder in commits}


def _is_counting(lineage: Lineage, folder: str) -> bool:
    """Return whether the checkpoint in a folder was not rolled back."""
    name = _parse_folder(folder)
    return name is not None and lineage.counts(name.attempt, name.step)


def _parse_folder(folder: object) -> FolderName | None:
    """Return the parsed name of a checkpoint's folder; None if it is invalid."""
    return FolderName.parse(folder) if isinstance(folder, str) else None


def is_begun(run: Storage) -> bool:
    """Return whether workers have written anything into a run's folder."""
    names = part_names(run.sub("history"))
    # Parts of the driver alone do not count: it writes before workers start.
    return bool(read_markers(run.sub("checkpoints"))) or any(not name.writer for name in names)


def check_continuation(run: Storage, warn: Callable[[str], None]) -> None:
    """Check that a run can continue from its own state. Writes nothing.

    Args:
        run: the run's folder.
        warn: called with a line for each problem that does not prevent the run from continuing.

    Raises:
        UserError: the history cannot be read, holds foreign parts or contradicts all checkpoints,
            or no checkpoint is complete.
    """
    found = read_evidence(run)
    if found.history.foreign:
        advice = _removal_advice(found.saved)
        raise UserError(*(f"{line}; {advice}" for line in found.history.foreign))
    # A run that has checkpoints must never start again from step 0.
    if found.saved and not found.current_commits:
        raise UserError(*contradictions(run, found.saved, found.lineage))
    for line in found.problems:
        warn(line)
    start = _start_step(found)
    steps = history.effective_steps(found.history.entries)
    driver = read_driver(run)
    # A driver that released the run has written all it had heard of.
    reported_step = driver.newest.step if driver.newest and not driver.released else 0
    last = steps[-1]["step"] if steps else 0
    if max(last, reported_step) > start:
        first = (
            f"from step {start + 1}"
            if start
            else "from the first step, because there is no checkpoint"
        )
        reported_text = (
            f", and the driver had received step {reported_step}" if reported_step > last else ""
        )
        warn(f"resuming {first}; the history has steps up to {last}{reported_text}")


def contradictions(
    run: Storage, saved: tuple[Commit, ...] | list[Commit], lineage: Lineage
) -> list[str]:
    """Return one line per checkpoint that says why it no longer counts."""
    return [
        f"checkpoint {run.uri('checkpoints', commit.folder)}: ignored: in the history "
        f"attempt {event.attempt} resumed from step {event.step}, which has no checkpoint "
        f"left; {FROM} {commit.step} resumes from this one"
        for commit in saved
        if (event := lineage.contradiction(*commit.place))
    ]


def _start_step(found: Evidence) -> int:
    """Return the step of the newest checkpoint that looks complete; 0 if there is no checkpoint.

    Raises:
        UserError: there are checkpoints, but none is complete.
    """
    checkpoints = found.run.sub("checkpoints")
    damaged = []
    for commit in found.current_commits:
        wrong = size_problems(checkpoints, commit)
        if not wrong:
            return commit.step
        damaged.append(f"checkpoint {checkpoints.uri(commit.folder)}: {wrong[0]}")
    if damaged or found.unreadable:
        raise UserError(*damaged, *found.unreadable)
    return 0


def _removal_advice(saved: tuple[Commit, ...]) -> str:
    """Return how to get rid of a foreign part."""
    if not saved:
        return "move it away"
    return f"move it away, or {FROM} {saved[0].step} resumes from that checkpoint without it"


def choose_commit(run: Storage, wanted: str, key: str = "--checkpoint") -> Commit:
    """Return the checkpoint given as `newest`, `best`, a step or a folder name.

    Its files are not checked.

    Args:
        run: the run's folder.
        wanted: the user's choice.
        key: the option that holds the choice, for messages.

    Raises:
        UserError: no checkpoint matches, or none that counts.
    """
    checkpoints, lineage = run.sub("checkpoints"), read_lineage(run.sub("history"))
    found = list_commits(checkpoints)
    if not found:
        raise UserError(f"{checkpoints.uri()}: the run has no checkpoint yet")
    counting = [commit for commit in found if lineage.counts(*commit.place)]
    if wanted in ("newest", "best") and not counting:
        raise UserError(*contradictions(run, found, lineage))
    if wanted == "newest":
        # If the newest marker is damaged, do not silently take an older checkpoint.
        folder, newest = next(iter(read_markers(checkpoints).items()))
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
    # Later items replace earlier ones: the newest checkpoint of a step wins, and one that counts
    # wins over one that does not.
    by_step = {str(commit.step): commit for commit in (*reversed(found), *reversed(counting))}
    if wanted not in by_step:
        raise UserError(
            f"{key}: {wanted}: expected newest, best or one of the steps "
            f"{', '.join(sorted(by_step, key=int))}{_nearest_hint(wanted, by_step)}"
        )
    return by_step[wanted]


def _nearest_hint(wanted: str, by_step: dict[str, Commit]) -> str:
    """Return a hint at the nearest choice."""
    if not wanted.isdecimal():
        return suggest_nearest(wanted, [*by_step, "newest", "best"])
    step = min(map(int, by_step), key=lambda step: abs(step - int(wanted)))
    return f" (did you mean '{step}'?)"


def find_commit(run: Storage, wanted: str) -> Commit:
    """Return the checkpoint that a user names, after checking its files.

    Args:
        run: the run's folder.
        wanted: the checkpoint's folder name or its step.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    checkpoints = run.sub("checkpoints")
    saved = list_commits(checkpoints)
    named = {commit.folder: commit for commit in saved}
    # Reversed, so that the newest checkpoint of a step wins.
    named |= {str(commit.step): commit for commit in reversed(saved)}
    if not named:
        raise UserError(f"--from: {wanted}: {checkpoints.uri()} has no checkpoint")
    if wanted not in named:
        steps = ", ".join(map(str, sorted({commit.step for commit in saved})))
        raise UserError(
            f"--from: {wanted}: no such checkpoint{suggest_nearest(wanted, named)}; expected one "
            f"of the steps {steps}, or the name of a folder in {checkpoints.uri()}"
        )
    if damaged := file_problems(checkpoints, named[wanted]):
        raise UserError(f"--from: {checkpoints.uri(named[wanted].folder)}: {damaged[0]}")
    return named[wanted]


def go_back(run: Storage, commit: Commit, warn: Callable[[str], None]) -> None:
    """Make the run continue from an earlier checkpoint, and record that in its history.

    History parts that are unreadable or do not belong to the run are moved to a subfolder.

    Args:
        run: the run's folder, owned by this process.
        commit: from `find_commit`.
        warn: called with a line for each part that is moved.

    Raises:
        UserError: storage rejects the entry.
    """
    storage = run.sub("history")
    for name, why in _unusable_parts(storage).items():
        _move_aside(storage, str(name))
        warn(f"{storage.uri(str(name))}: {why}; now in {storage.uri(SET_ASIDE)}")
    # Above every attempt that saved a checkpoint, even if its history is lost.
    saved = max(other.place[0] for other in list_commits(run.sub("checkpoints")))
    number = max(history.next_attempt(storage), saved + 1)
    writer = HistoryWriter(storage, number, warn, writer="d")
    writer.add("returned", {"step": commit.step, "commit": commit.folder})
    writer.flush()
    # `flush` only warns, but a run must not continue without this entry.
    if writer.unwritten()[1]:
        raise UserError(f"{storage.uri()}: cannot be written")


def _unusable_parts(storage: Storage) -> dict[PartName, str]:
    """Return the parts that must be moved aside, with the reason."""
    found: dict[PartName, str] = {}
    for name in part_names(storage):
        try:
            part = read_part(storage, name)
            if part.foreign_reason:
                found[name] = part.foreign_reason
            # Parsed only to find unreadable lines.
            history.entries_of(storage, [part])
        except UserError as error:
            found[name] = error.problems[0].removeprefix(f"{storage.uri(str(name))}: ")
    return found


def _move_aside(storage: Storage, name: str) -> None:
    """Move a part into the subfolder for unusable parts."""
    if not storage.is_local:
        # Object stores cannot rename: copy first, then delete.
        storage.write(storage.read(name), SET_ASIDE, name)
        storage.delete(name)
        return
    target = Path(storage.path(SET_ASIDE, name))
    target.parent.mkdir(exist_ok=True)
    Path(storage.path(name)).rename(target)
