"""The succession of a run's attempts: what one leaves to the next."""

from __future__ import annotations

from elastrata.checkpoints.commit import Commit, folders
from elastrata.run import history
from elastrata.run.unwritten import restore_history
from elastrata_pipelines.storage import Storage


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
    saved = max((folder.attempt for folder in folders(run.sub("checkpoints"))), default=0)
    return max(history.next_attempt(storage), saved + 1)
