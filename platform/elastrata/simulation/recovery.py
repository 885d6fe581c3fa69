"""How long a run stands still, by what happened: as measured, not as hoped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastrata_pipelines.errors import UserError

_KINDS = {
    "lost": "node killed",
    "drained": "node drained",
    "joined": "node added",
    "driver": "driver killed",
}


@dataclass(frozen=True, kw_only=True)
class RecoverySeconds:
    """From the last step before to the first one after.

    The defaults are the medians of `benchmarks/results/faults.json`: three nodes on two cores. With
    many workers, or a large model, they are longer; `read_recovery` takes a table of your own.
    """

    lost: float = 17.78
    """Workers are gone without notice."""
    drained: float = 10.48
    """Workers are about to go."""
    joined: float = 13.65
    """Workers are taken in."""
    driver: float = 32.95
    """The driver is gone, with all hot copies; the job is started again."""


def read_recovery(path: str) -> RecoverySeconds:
    """The medians of a table that `benchmarks/faults.py` wrote.

    Raises:
        UserError: no such file, or not such a table.
    """
    where = f"--recovery: {path}"
    try:
        kinds = json.loads(Path(path).read_text(encoding="utf-8"))["kinds"]
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"{where}: expected a table of benchmarks/faults.py, with 'kinds'"
        ) from None
    found = {name: _median(kinds, kind) for name, kind in _KINDS.items()}
    problems = [
        f"{where}: {_KINDS[name]!r}: expected next_step_after_s with a median"
        for name, seconds in found.items()
        if seconds is None
    ]
    if problems:
        raise UserError(*problems)
    return replace(RecoverySeconds(), **{name: float(s) for name, s in found.items() if s})


def _median(kinds: Mapping[str, Any], kind: str) -> float | None:
    try:
        return float(kinds[kind]["next_step_after_s"]["median"])
    except (KeyError, TypeError, ValueError):
        return None
