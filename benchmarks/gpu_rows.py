"""The rows that cases become, in a JSON Lines file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_process import NO_MEMORY, OK, TIMEOUT, Row, apart
from gpu_table import Case

_LEAST_SECONDS = 20.0
"""No case is begun with less time."""


class Rows:
    """Runs cases, each in a process of its own, and keeps their rows.

    Args:
        results: the JSON Lines file.
        minutes: no case is begun, or goes on, after so long.
        again: whether cases that did not end well are repeated.
        options: further arguments of every case's function.
        environment: further variables of every case.
    """

    def __init__(
        self,
        results: Path,
        *,
        minutes: float,
        again: bool = False,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self._results, self._again = results, again
        self._options, self._environment = options, environment
        self._end = time.monotonic() + 60 * minutes
        results.parent.mkdir(parents=True, exist_ok=True)
        self.rows = {row["case"]: row for row in read_rows(results)}

    def run(self, cases: Sequence[Case]) -> None:
        """All that have no row yet, as far as the time goes."""
        for case in cases:
            if self._is_done(case) or not self._is_wanted(case):
                continue
            left = self._end - time.monotonic()
            if left < min(_LEAST_SECONDS, case.seconds):
                print(f"no time is left: the same command goes on with {case.name!r}", flush=True)
                return
            self._add(case, min(left, case.seconds))

    def _is_done(self, case: Case) -> bool:
        row = self.rows.get(case.name)
        return bool(row) and (not self._again or row["status"] in (OK, NO_MEMORY))

    def _is_wanted(self, case: Case) -> bool:
        before = self.rows.get(case.instead_of, {})
        return not case.instead_of or before.get("status") == NO_MEMORY

    def _add(self, case: Case, seconds: float) -> None:
        began = time.monotonic()
        on_gpu = case.environment if self._options["device"] == "cuda" else {}
        found = apart(case, seconds, self._options, {**self._environment, **on_gpu})
        if found["status"] == TIMEOUT and seconds < case.seconds:
            print(f"no time is left for {case.name!r}", flush=True)
            return  # it is begun anew the next time
        about = {"case": case.name, **case.values}
        row = {**about, **found, "case_seconds": round(time.monotonic() - began, 1)}
        append(self._results, row)
        self.rows[case.name] = row
        print(json.dumps(_short(row)), flush=True)


def read_rows(results: Path) -> Iterator[Row]:
    """The rows of a file, which may have been cut off in the last one."""
    text = results.read_text(encoding="utf-8") if results.is_file() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def append(results: Path, row: Row) -> None:
    """Writes a row so that it is there whatever comes, on a line of its own."""
    with results.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.seek(0, os.SEEK_END)
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _short(row: Row) -> Row:
    """What is shown of a row, while others are measured."""
    rates = ("sequences_per_second", "tokens_per_second", "mfu")
    shown = {key: row[key]["median"] for key in rates if row.get(key)}
    kept = ("case", "status", "error", "allocated_bytes", "plan_allocated_bytes", "case_seconds")
    return {key: row[key] for key in kept if key in row} | shown
