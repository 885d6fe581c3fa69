"""The history of a run: what every step did, kept beside the checkpoints, through all restarts.

Rank 0 writes it in parts, `<attempt>-<part>.jsonl`, a line an entry. What a commit contains is in
the history before the commit is begun.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastrata_pipelines.storage import Storage

PART_SECONDS = 15.0
"""Entries that no commit waits for are written this often: each part is a file."""


def next_attempt(storage: Storage) -> int:
    """1 for a new run, then one more for every group of workers that wrote into the history."""
    return max((int(name.split("-")[0]) for name in _parts(storage)), default=0) + 1


def read(storage: Storage) -> list[dict[str, Any]]:
    """All entries of all attempts, in the order they were written."""
    entries: list[dict[str, Any]] = []
    for name in _parts(storage):
        entries += [json.loads(line) for line in storage.read(name).splitlines()]
    return entries


def _parts(storage: Storage) -> list[str]:
    """The parts in order. A writer that was killed may have left a file that is none."""
    return [name for name in storage.names() if name.endswith(".jsonl")]


def effective_steps(entries: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that made the model what it is: those a later attempt rolled back are left out."""
    steps: dict[int, Mapping[str, Any]] = {}
    for entry in entries:
        if entry["kind"] == "started":
            steps = {step: record for step, record in steps.items() if step <= entry["step"]}
        elif entry["kind"] == "step":
            steps[entry["step"]] = entry
    return [steps[step] for step in sorted(steps)]


def world_sizes(entries: Iterable[Mapping[str, Any]]) -> list[int]:
    """World size of every group of workers that was ready for a step, in order."""
    return [entry["world_size"] for entry in entries if entry["kind"] == "started"]


class HistoryWriter:
    """Writes the history of one attempt.

    Args:
        storage: the run's folder of history.
        attempt: from `next_attempt`.
        warn: called with one line where storage does not take a part; it is tried again later.
    """

    def __init__(self, storage: Storage, attempt: int, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._storage = storage
        self._attempt = attempt
        self._lines: list[bytes] = []
        self._parts = 0
        self._written = time.monotonic()

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Adds an entry; it is on storage after the next `flush`, or some seconds later."""
        line = {"kind": kind, "attempt": self._attempt, "time": round(time.time(), 3), **entry}
        self._lines.append(json.dumps(line).encode() + b"\n")
        if time.monotonic() - self._written > PART_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what has been added since the last time."""
        if self._lines:
            name = f"{self._attempt:04d}-{self._parts:08d}.jsonl"
            try:
                self._storage.write(b"".join(self._lines), name)
                self._lines, self._parts = [], self._parts + 1
            except Exception as error:
                self._warn(f"history cannot be written to {self._storage.url} for now: {error}")
        self._written = time.monotonic()
