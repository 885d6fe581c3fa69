"""The trace of a run's workers, who come and go: from a file, or drawn at given rates."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from elastrata.recipe.yaml_values import read_text
from elastrata_pipelines.errors import UserError, nearest

Kind = Literal["join", "lose", "drain", "kill", "driver"]
KINDS: tuple[Kind, ...] = ("join", "lose", "drain", "kill", "driver")
_HOUR = 3600.0
_COLUMNS = ("seconds", "event", "workers")
_WORKERS = re.compile(r"0*[1-9][0-9]{0,5}")
_MOST_BYTES, _MOST_PROBLEMS, _SHOWN = 2**26, 100, 60


@dataclass(frozen=True, order=True)
class Event:
    """Something happens to some workers."""

    seconds: float
    """Since the start of the run."""
    kind: Kind
    """join: they are there, idle. lose: they are gone. drain: they are about to go. kill: their
    processes are gone, their machines are there. driver: the driver is gone, whatever the
    number."""
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How often workers go and come back."""

    lost_per_hour: float
    """The rate of each worker."""
    with_notice: float = 0.0
    """Share of the losses that are told before."""
    hours_away: float = 1.0
    """Mean time until another worker takes the place of a lost one."""
    driver_lost_per_hour: float = 0.0


def read_trace(path: str) -> list[Event]:
    """Read events from a CSV file with the columns seconds, event and workers, in order of time.

    Raises:
        UserError: it cannot be read; or one line for each line that is wrong.
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
        problem = _problem(cells, before)
        if problem:
            problems.append(f"{path}:{number}: {problem}")
            if len(problems) == _MOST_PROBLEMS:
                break
            continue
        before = float(cells[0])
        events.append(Event(before, _kind(cells[1]), int(cells[2])))
    if problems:
        raise UserError(*problems)
    if not events:
        raise UserError(f"--trace: {path}: no events: expected lines such as 0,join,8")
    return events


def _problem(cells: list[str], before: float) -> str:
    if len(cells) != len(_COLUMNS):
        return f"{len(cells)} values: expected {','.join(_COLUMNS)}"
    try:
        seconds = float(cells[0])
    except ValueError:
        return f"seconds: {_short(cells[0])}: expected a number"
    if not before <= seconds < float("inf"):
        least = f"expected at least {before:g}, the time of the line before"
        return f"seconds: {_short(cells[0])}: {least}"
    if cells[1] not in KINDS:
        close = nearest(cells[1][:_SHOWN], KINDS)
        return f"event: {_short(cells[1])}: expected {', '.join(KINDS)}{close}"
    if not _WORKERS.fullmatch(cells[2]):
        return f"workers: {_short(cells[2])}: expected a whole number above 0 and below a million"
    return ""


def _short(cell: str) -> str:
    return repr(cell[:_SHOWN])


def _kind(text: str) -> Kind:
    return next(kind for kind in KINDS if kind == text)


def drawn_events(workers: int, rates: Rates, *, seconds: float, seed: int) -> Iterator[Event]:
    """Draw events: all workers at the start, then losses and returns at exponential times."""
    draw = np.random.default_rng(seed)
    yield Event(0.0, "join", workers)
    coming: list[float] = []
    there, now = workers, 0.0
    driver = _next(draw, 0.0, rates.driver_lost_per_hour)
    going = _next(draw, 0.0, there * rates.lost_per_hour)
    while (now := min(going, driver, coming[0] if coming else np.inf)) <= seconds:
        if coming and now == coming[0]:
            heapq.heappop(coming)
            there += 1
            yield Event(now, "join", 1)
        elif now == driver:
            yield Event(now, "driver")
            driver = _next(draw, now, rates.driver_lost_per_hour)
            continue
        else:
            there -= 1
            heapq.heappush(coming, now + draw.exponential(rates.hours_away * _HOUR))
            yield Event(now, "drain" if draw.random() < rates.with_notice else "lose", 1)
        # Exponential times have no memory: the next loss may be drawn anew whenever the number of
        # workers changes.
        going = _next(draw, now, there * rates.lost_per_hour)


def _next(draw: np.random.Generator, now: float, per_hour: float) -> float:
    return float(now + draw.exponential(_HOUR / per_hour)) if per_hour > 0 else float("inf")
