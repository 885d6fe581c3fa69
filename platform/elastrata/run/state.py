"""The state of a run: whether it is running, has ended and how, or gives no sign of life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from elastrata.run.attempts import attempts
from elastrata.run.ownership import NewestStep, owner_is_alive, read_owner
from elastrata.run.timeline import end_index
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
State = Literal["running", "finished", "stopped", "failed", "silent"]
SILENT_SECONDS = 120.0
"""A run that wrote nothing for this long, or for ten of its steps, gives no sign of life."""

_ENDS: dict[str, State] = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}


@dataclass(frozen=True, kw_only=True)
class Driver:
    """All that can be known about the process that drives a run."""

    alive: bool | None = None
    """None: nobody can tell."""
    since: float = 0.0
    """Unix time at which it took the run over."""
    seen: float = 0.0
    """Unix time of its last sign of life."""
    newest: NewestStep | None = None
    """The newest step that it has told of."""
    token: str | None = None
    """The name of its launch."""
    released: bool = False
    """Whether it has ended and said so."""


def look_at_driver(run: Storage) -> Driver:
    """The driver by the run's folder; a damaged file says nothing."""
    try:
        owner = read_owner(run)
        if owner is None:
            return Driver()
        return Driver(
            alive=owner_is_alive(run),
            since=owner.since,
            seen=owner.time,
            newest=owner.newest,
            token=owner.token,
            released=owner.released,
        )
    except UserError:
        return Driver()


def driver_problems(run: Storage) -> tuple[str, ...]:
    """The problems of the file in which the driver tells of itself."""
    try:
        read_owner(run)
    except UserError as error:
        return error.problems
    return ()


def run_state(
    entries: Sequence[Entry], *, done: bool, driver: Driver, now: float
) -> tuple[State, str]:
    """The state of a run, and the same in words.

    Steps and entries decide it, in the order they were written. A clock does only where no process
    and no entry tells: for a driver on another host, and in histories of old.

    Args:
        entries: its history.
        done: whether it has come to its last step, or to its target.
        driver: what is known about its driver.
        now: Unix time.
    """
    if ended := _end(entries, driver):
        state = _ENDS.get(ended["status"], "failed")
        reason = ended.get("text") or _halt(entries)
        return state, f"{state}: {reason}" if reason and state != "finished" else state
    seen = last_sign(entries, driver)
    steps = [entry["seconds"] for entry in entries if entry["kind"] == "step"][-1:]
    limit = max([SILENT_SECONDS, *(10 * seconds for seconds in steps)])
    lately = seen is not None and abs(now - seen) <= limit
    if driver.alive or (driver.alive is None and lately and not done):
        return "running", "running"
    if done:
        return "finished", "finished"
    since = f"since {utc(seen)}" if seen else "yet"
    return "silent", f"no sign of life {since}{_unrecorded(entries, driver)}"


def last_sign(entries: Sequence[Entry], driver: Driver) -> float | None:
    """Unix time of the last sign of life, of workers or driver; None: there was none yet."""
    newest = max((entry["attempt"] for entry in entries), default=0)
    last = [entry["time"] for entry in entries if entry["attempt"] == newest][-1:]
    ended = [entry["time"] for entry in entries if entry["kind"] == "ended"][-1:]
    return max([driver.seen, *last, *(ended if _end(entries, driver) else [])]) or None


def utc(seconds: float) -> str:
    """A Unix time for people."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _unrecorded(entries: Sequence[Entry], driver: Driver) -> str:
    """The steps that a dead driver had heard of and that are not in the history, in words."""
    steps = (entry["step"] for entry in entries if entry["kind"] == "step")
    if driver.newest and driver.newest.step > (last := max(steps, default=0)):
        return f"; at least up to step {driver.newest.step:,}, on record up to step {last:,}"
    return ""


def _end(entries: Sequence[Entry], driver: Driver) -> Entry | None:
    """The entry that says how the newest launch ended; None where that one has not ended."""
    ended = next((entry for entry in reversed(entries) if entry["kind"] == "ended"), None)
    if ended is None:
        return None
    groups = attempts(entries)
    is_last = end_index(groups, ended) == len(groups) - 1
    if "last" not in ended:  # of an earlier version
        is_last |= driver.released
    if driver.alive:
        is_old = driver.since > ended["time"]
        began_again = ended["driver"] != driver.token if "driver" in ended else is_old
        is_last = is_last and not began_again
    return ended if is_last else None


def _halt(entries: Sequence[Entry]) -> str:
    """Why the newest group of workers stopped as it was asked; empty where it did not."""
    kinds = ("started", "halted")
    last = [entry for entry in entries if entry["kind"] in kinds][-1:]
    return "".join(str(entry.get("text", "")) for entry in last)
