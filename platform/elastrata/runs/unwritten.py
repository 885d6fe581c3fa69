"""Lines of the history that travel in a commit, as they were on no storage when it was begun."""

from __future__ import annotations

from elastrata.checkpoints.commit import Commit
from elastrata.runs.history import HistoryWriter, restore_part
from elastrata_pipelines.storage import Storage

_PART, _LINES = "history_part", "history_lines"


def unwritten(writer: HistoryWriter) -> dict[str, str]:
    """What goes into a commit's `extra`."""
    part, lines = writer.unwritten()
    return {_PART: part, _LINES: lines.decode()}


def restore_history(storage: Storage, commit: Commit) -> None:
    """Writes the lines that travelled in a commit; nothing happens where they are there.

    Args:
        storage: the run's folder of history.
        commit: of any tier.
    """
    if _PART in commit.extra:
        restore_part(storage, commit.extra[_PART], commit.extra[_LINES].encode())
