"""How long a run stands still, by what happened: as measured, not as hoped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastrata.recipe.yaml_values import read_text
from elastrata_pipelines.checked_json import parse_json
from elastrata_pipelines.errors import UserError

_MOST_BYTES, _MOST_SECONDS = 2**26, 10**9
_KINDS = {
    "killed": "worker killed (SIGKILL)",
    "lost": "node killed",
    "drained": "node drained",
    "joined": "node added",
    "driver": "driver killed",
}


@dataclass(frozen=True, kw_only=True)
class RecoverySeconds:
    """From the last step before to the first one after.

    The defaults are the medians of `benchmarks/results/faults.json`: three nodes on two cores. With
    many workers, or a large model, they are others; `read_recovery` takes a table of your own.
    """

    killed: float = 9.52
    """The process of a worker is gone; its machine is there."""
    lost: float = 18.37
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
    table = parse_json(read_text(Path(path), where, most=_MOST_BYTES), where)
    kinds = table.get("kinds") if isinstance(table, dict) else None
    if not isinstance(kinds, dict):
        raise UserError(f"{where}: expected a table of benchmarks/faults.py, with 'kinds'")
    medians = {name: _median(kinds, kind) for name, kind in _KINDS.items()}
    problems = [
        f"{where}: {_KINDS[name]!r}: expected next_step_after_s with a median, in seconds"
        for name, seconds in medians.items()
        if seconds is None
    ]
    if problems:
        raise UserError(*problems)
    return replace(RecoverySeconds(), **{name: s for name, s in medians.items() if s is not None})


def _median(kinds: Mapping[str, Any], kind: str) -> float | None:
    try:
        median = kinds[kind]["next_step_after_s"]["median"]
    except (KeyError, TypeError):
        return None
    is_number = isinstance(median, int | float) and not isinstance(median, bool)
    return float(median) if is_number and 0 <= median <= _MOST_SECONDS else None
