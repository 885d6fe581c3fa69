"""The list of the runs in a folder: how each of them stands."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from elastrata.run.names import run_names
from elastrata.run.state import State
from elastrata.run.status import status
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_THREADS = 8


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
    """Of its newest group."""
    seen: float | None
    """Unix time of its last sign of life."""
    text: str
    """The state in words, or why it cannot be read."""


def list_runs(storage: Storage) -> Sequence[ListedRun]:
    """The runs in a folder, the one that gave a sign of life last first."""
    with ThreadPoolExecutor(_THREADS) as pool:
        listed = list(pool.map(partial(_listed, storage), run_names(storage)))
    return sorted(listed, key=lambda run: (-(run.seen or 0.0), run.name))


def _listed(storage: Storage, name: str) -> ListedRun:
    run = storage.sub(name)
    try:
        found = status(run)
    except UserError as error:
        return ListedRun(
            name=name, url=run.uri(), state=None, steps=0, steps_in_all=0, loss=None, workers=0,
            seen=None, text=error.problems[0],
        )  # fmt: skip
    return ListedRun(
        name=name,
        url=run.uri(),
        state=found.state,
        steps=found.steps,
        steps_in_all=found.steps_in_all,
        loss=found.loss,
        workers=found.world_sizes[-1].world_size if found.world_sizes else 0,
        seen=found.seen,
        text=found.text,
    )
