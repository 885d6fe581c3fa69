"""Lines of the history that travel in a commit, as they were on no storage when it was begun."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from elastrata.checkpoints.commit import Commit
from elastrata.run.history import HistoryWriter, restore_part
from elastrata.run.parts import Link, PartName
from elastrata_pipelines.storage import Storage

_PART, _LINES, _HEAD = "history_part", "history_lines", "history_head"


def unwritten(writer: HistoryWriter) -> dict[str, Any]:
    """What goes into a commit's `extra`: the lines, and the part before them."""
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


def head(commit: Commit) -> Link | None:
    """The part of the history that was there before the commit; None: it does not say."""
    try:
        return Link.model_validate(commit.extra.get(_HEAD))
    except ValidationError:
        return None
