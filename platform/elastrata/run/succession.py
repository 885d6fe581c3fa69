"""The succession of a run's attempts: one leaves to the next its state, and with it those lines of
its history that were on no storage when the save was begun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from elastrata.checkpoints.commit import Commit, folders
from elastrata.run import history
from elastrata.run.history import HistoryWriter, restore_part
from elastrata.run.parts import Link, PartName
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_PART, _LINES, _HEAD = "history_part", "history_lines", "history_head"


def take_over(run: Storage, commit: Commit | None) -> int:
    """Makes the history whole that the next attempt goes on with.

    Lines that died with the worker who had yet to write them, and travelled in the commit, are
    written.

    Args:
        run: its folder.
        commit: what it continues from; None: nothing, or another run's.

    Returns:
        The number of the attempt, higher than that of any before.
    """
    storage = run.sub("history")
    if commit:
        restore_history(storage, commit)
    return max(history.next_attempt(storage), _last_saved(run.sub("checkpoints")) + 1)


def _last_saved(checkpoints: Storage) -> int:
    """The last attempt that has saved; 0 for none, or where the folder is none any more: then the
    run goes on from memory, and its history knows the attempts."""
    try:
        return max((folder.attempt for folder in folders(checkpoints)), default=0)
    except UserError:
        return 0


def unwritten(writer: HistoryWriter) -> dict[str, Any]:
    """The unwritten lines and the part before them, for a commit's `extra`."""
    head = writer.head
    part, lines = writer.unwritten()
    return {_PART: part, _LINES: lines.decode(), _HEAD: head.model_dump() if head else None}


def restore_history(storage: Storage, commit: Commit) -> None:
    """Writes the lines that travelled in a commit; nothing happens where they are there.

    Args:
        storage: the run's folder of history.
        commit: of any tier.
    """
    part, lines = commit.extra.get(_PART), commit.extra.get(_LINES)
    if isinstance(part, str) and isinstance(lines, str) and PartName.parse(part):
        restore_part(storage, part, lines.encode())


def without_history(extra: Mapping[str, Any]) -> dict[str, Any]:
    """A commit's `extra` without what travels in it of its run's history."""
    return {key: value for key, value in extra.items() if key not in (_PART, _LINES, _HEAD)}


def head(commit: Commit) -> Link | None:
    """The part of the history that was there before the commit; None: it does not say."""
    try:
        return Link.model_validate(commit.extra.get(_HEAD))
    except ValidationError:
        return None
