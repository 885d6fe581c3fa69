"""The choice of one of a run's checkpoints: the newest, the best, or that of a step."""

from __future__ import annotations

from elastrata.checkpoints.commit import Commit, commits, markers
from elastrata.checkpoints.retention import best_commit
from elastrata.run.evidence import contradictions
from elastrata.run.history import read_lineage
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
