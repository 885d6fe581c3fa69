"""Trace of worker arrivals and losses: from a file, or random at given rates."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from elastrata.recipe.yaml_values import read_text
from elastrata_pipelines.errors import UserError, suggest_nearest

Kind = Literal["join", "lose", "drain", "kill", "driver"]
KINDS: tuple[Kind, ...] = ("join", "lose", "drain", "kill", "driver")
_HOUR = 3600.0
_COLUMNS = ("seconds", "event", "workers")
_WORKERS = re.compile(r"0*[1-9][0-9]{0,5}")
_MOST_BYTES, _MOST_PROBLEMS, _SHOWN = 2**26, 100, 60


@dataclass(frozen=True, order=True)
class Event:
    """Change of some workers' availability."""

    seconds: float
    """Seconds since the start of the run."""
    kind: Kind
    """join: idle workers arrive. lose: workers disappear. drain: workers will disappear after a
    notice. kill: processes die, but their machines remain. driver: the driver dies, regardless of
    `workers`."""
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates at which workers disappear and return."""

    lost_per_hour: float
    """Rate of each worker."""
    with_notice: float = 0.0
    """Share of losses with a notice."""
    hours_away: float = 1.0
    """Mean hours until a lost worker is replaced."""
    driver_lost_per_hour: float = 0.0


def read_trace(path: str) -> list[Event]:
    """Return the events of a CSV file with the columns seconds, event and workers, sorted by time.

    Raises:
        UserError: the file cannot be read, or lines are invalid; one line for each.
    """
    lines = read_text(Path(path), f"--trace: {path}", most=_MOST_BYTES).split("\n")
    numbered = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if numbered and tuple(cell.strip() for cell in numbered[0][1].split(",")) == _COLUMNS:
        numbered = numbered[1:]
    events, problems, before = list[Event](), list[str](), 0.0
    for number, line in numbered:
        cells = [cell.strip() for cell in line.split(",")]
        problem = _find_problem(cells, before)
        if problem:
            problems.append(f"{path}:{number}: {problem}")
            # A file of another format would otherwise give a message for each of its lines.
            if len(problems) == _MOST_PROBLEMS:
                break
            continue
        before = float(cells[0])
        events.append(Event(before, _parse_kind(cells[1]), int(cells[2])))
    if problems:
        raise UserError(*problems)
    if not events:
        raise UserError(f"--trace: {path}: no events: expected lines such as 0,join,8")
    return events


def _find_problem(cells: list[str], before: float) -> str:
    """Return the problem of a line, or an empty text."""
    if len(cells) != len(_COLUMNS):
        return f"{len(cells)} values: expected {','.join(_COLUMNS)}"
    try:
        seconds = float(cells[0])
    except ValueError:
        return f"seconds: {_quote(cells[0])}: expected a number"
    if not before <= seconds < float("inf"):
        least = f"expected at least {before:g}, the time of the previous line"
        return f"seconds: {_quote(cells[0])}: {least}"
    if cells[1] not in KINDS:
        close = suggest_nearest(cells[1][:_SHOWN], KINDS)
        return f"event: {_quote(cells[1])}: expected {', '.join(KINDS)}{close}"
    if not _WORKERS.fullmatch(cells[2]):
        return f"workers: {_quote(cells[2])}: expected a whole number above 0 and below a million"
    return ""


def _quote(cell: str) -> str:
    return repr(cell[:_SHOWN])


def _parse_kind(text: str) -> Kind:
    return next(kind for kind in KINDS if kind == text)


def sample_events(workers: int, rates: Rates, *, seconds: float, seed: int) -> Iterator[Event]:
    """Yield random events: all workers at the start, then losses and returns at exponential
    times."""
    rng = np.random.default_rng(seed)
    yield Event(0.0, "join", workers)
    return_times: list[float] = []
    available, now = workers, 0.0
    next_driver_loss = _sample_next(rng, 0.0, rates.driver_lost_per_hour)
    next_loss = _sample_next(rng, 0.0, available * rates.lost_per_hour)
    while (
        now := min(next_loss, next_driver_loss, return_times[0] if return_times else np.inf)
    ) <= seconds:
        if return_times and now == return_times[0]:
            heapq.heappop(return_times)
            available += 1
            yield Event(now, "join", 1)
        elif now == next_driver_loss:
            yield Event(now, "driver")
            next_driver_loss = _sample_next(rng, now, rates.driver_lost_per_hour)
            continue
        else:
            available -= 1
            heapq.heappush(return_times, now + rng.exponential(rates.hours_away * _HOUR))
            yield Event(now, "drain" if rng.random() < rates.with_notice else "lose", 1)
        # Exponential times are memoryless, so the next loss can be sampled again each time the
        # number of workers changes.
        next_loss = _sample_next(rng, now, available * rates.lost_per_hour)


def _sample_next(rng: np.random.Generator, now: float, per_hour: float) -> float:
    """Return the time of the next event at a rate; infinity for rate 0."""
    return float(now + rng.exponential(_HOUR / per_hour)) if per_hour > 0 else float("inf")
