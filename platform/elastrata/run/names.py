"""The names of runs, and the list of those in a folder.

A name is a folder, a URL, or the bare name of a run in the folder where runs are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from elastrata.run.claim import TRIALS, folder_kind, with_article
from elastrata.run.folder import RUN_FILE
from elastrata.run.state import State
from elastrata.run.status import status
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.storage import Storage

RUNS = "runs"
"""Where a recipe keeps its runs by default."""
_THREADS = 8


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
        raise UserError(f"{here.uri()}: no run here ({RUN_FILE} is missing){_hint(here)}")
    under = Storage(storage).sub(name)
    if under.exists(RUN_FILE):
        return under
    known = run_names(Storage(storage))
    raise UserError(
        f"{name}: no run here ({RUN_FILE} is missing), and none of that name in "
        f"{Storage(storage).uri()}{_hint(under) or _hint(here) or nearest(name, known)}"
    )


def _hint(folder: Storage) -> str:
    """Return what the folder is, for the end of the line that says that it is no run."""
    found = folder_kind(folder)
    if found == "sweep":
        return f"; it is a sweep, and its trials are the runs in {folder.uri(TRIALS)}"
    return "" if found in ("nothing", "other files", "run") else f"; it is {with_article(found)}"


def place_of_model(model: str) -> str:
    """The folder or URL of a model: of a run, maybe by its bare name, or of an export.

    Raises:
        UserError: it is a bare name, and no run has it.
    """
    is_name = "/" not in model and not Storage(model).exists()
    return named_run(model).url if is_name else model


def run_names(storage: Storage) -> list[str]:
    """The names of the runs in a folder, sorted."""
    return [name for name in storage.names() if storage.exists(name, RUN_FILE)]


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """A run in a list. The field names are keys of `elastrata runs --json`."""

    name: str
    url: str
    state: State | None
    """None: it cannot be read."""
    steps: int
    steps_in_all: int
    loss: float | None
    """Training loss of the last step."""
    workers: int
    """Size of its newest group."""
    seen: float | None
    """Unix time of its last sign of life."""
    text: str
    """The state in words, or why it cannot be read."""
    problems: tuple[str, ...] = ()
    """As those of `status`."""


def list_runs(storage: Storage) -> Sequence[ListedRun]:
    """The runs in a folder, the one that gave a sign of life last first."""
    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(pool.map(partial(_listed, storage), run_names(storage)))
    return sorted(listed, key=lambda run: (-(run.seen or 0.0), run.name))


def _listed(storage: Storage, name: str) -> ListedRun:
    run = storage.sub(name)
    try:
        current = status(run)
    except UserError as error:
        return ListedRun(
            name=name, url=run.uri(), state=None, steps=0, steps_in_all=0, loss=None, workers=0,
            seen=None, text=error.problems[0],
        )  # fmt: skip
    return ListedRun(
        name=name,
        url=run.uri(),
        state=current.state,
        steps=current.steps,
        steps_in_all=current.steps_in_all,
        loss=current.loss,
        workers=current.world_sizes[-1].world_size if current.world_sizes else 0,
        seen=current.seen,
        text=current.text,
        problems=current.problems,
    )
