"""The names of runs: a folder, a URL, or the bare name of one in the folder where runs are kept."""

from __future__ import annotations

from elastrata.run.folder import RUN_FILE
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

RUNS = "runs"
"""Where a recipe keeps its runs by default."""


def named_run(name: str, storage: str = RUNS) -> Storage:
    """The folder of a run.

    Args:
        name: its folder or URL, or its name.
        storage: where runs of that name are looked for.

    Raises:
        UserError: there is no such run; names the nearest one.
    """
    here = Storage(name)
    if "://" in name or here.exists(RUN_FILE):
        return here
    if "/" in name:
        raise UserError(f"{here.uri()}: no run here ({RUN_FILE} is missing)")
    under = Storage(storage).sub(name)
    if under.exists(RUN_FILE):
        return under
    known = run_names(Storage(storage))
    raise UserError(
        f"{name}: no run here ({RUN_FILE} is missing), and none of that name in "
        f"{Storage(storage).uri()}{nearest(name, known)}"
    )


def run_names(storage: Storage) -> list[str]:
    """The names of the runs in a folder, sorted."""
    return [name for name in storage.names() if storage.exists(name, RUN_FILE)]
