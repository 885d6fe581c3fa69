"""Ownership of a run, by the protocol of `docs/explanation/recovery.md`.

The owner rewrites `driver.json` in the run's folder every few seconds, with an increasing counter
(a heartbeat). A second driver checks whether the owner's process exists if it can see it, and
otherwise whether the counter still increases.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from elastrata.run.process import Process, this_process
from elastrata_pipelines.checked_json import UnreadableError, read_record
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

DRIVER_FILE = "driver.json"
BEAT_SECONDS = 5.0
"""Interval between two heartbeats."""
WATCHED_BEATS = 3
"""A driver of which only the file is visible is dead if it misses this many heartbeats."""
FRESH_BEATS = 4
"""A single look takes a driver for alive if its file is at most this many heartbeats old."""
_SECONDS_BETWEEN_LOOKS = 0.2
_FIRST_LOOK_SECONDS = 1.0
"""Delay of the owner's first check for a rival that started at the same moment."""
# An unreachable storage must not keep the process from ending.
_CLOSING_SECONDS = 10.0
"""Time limit for writing the release at the end of a run."""

Time = Annotated[float, Field(ge=0, lt=2**37, allow_inf_nan=False)]


class NewestStep(BaseModel):
    """The newest step reported to the owner; the history contains it some seconds later."""

    model_config = ConfigDict(frozen=True)

    step: NonNegativeInt
    samples: NonNegativeInt
    tokens: NonNegativeInt
    loss: Annotated[float, Field(allow_inf_nan=False)] | None
    """None if not finite."""


class Owner(BaseModel):
    """The driver of a run; the content of `driver.json`."""

    model_config = ConfigDict(frozen=True)

    token: str
    """Random identifier of one launch."""
    host: str
    boot_id: str | None
    """The host's boot id, new at every boot; None if the system has none."""
    pid_namespace: str | None
    """The PID namespace of `pid`. Containers on one host share its boot id, but not its PIDs."""
    pid: Annotated[PositiveInt, Field(lt=2**31)]
    process_start: NonNegativeInt | None
    """Clock ticks from the host's boot to the process's start; distinguishes processes of equal
    PID."""
    since: Time
    """Unix time, by the owner's clock, at which it became the owner."""
    beat: NonNegativeInt = 0
    """Counter that increases with every write of the file."""
    beat_seconds: Annotated[PositiveFloat, Field(le=60.0)]
    """Interval between two writes of the file."""
    time: Time
    """Unix time, by the owner's clock, of the newest heartbeat."""
    released: bool = False
    """Whether the owner has ended and released the run."""
    folder: str | None = None
    """The folder that it owns; None if written by an earlier version. A copy of this file in
    another folder owns nothing."""
    newest: NewestStep | None = None
    """None before the first step."""

    @property
    def process(self) -> Process | None:
        """The owner's process; None if its system did not identify it unambiguously."""
        if self.boot_id is None or self.pid_namespace is None or self.process_start is None:
            return None
        return Process(self.boot_id, self.pid_namespace, self.pid, self.process_start)

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None if this process cannot see that."""
        return self.process.lives() if self.process else None

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on host {self.host}, since {since}"


class Ownership:
    """A run owned by this process, until the block of `own_run` ends or the run is lost."""

    def __init__(self, run: Storage, owner: Owner, lost: Callable[[str], None]) -> None:
        self._run, self._owner, self._lost = run, owner, lost
        self._newest: NewestStep | None = None
        self._ending, self._was_lost = Event(), Event()
        # A daemon thread, so that a hung storage does not block the interpreter's exit.
        self._thread = Thread(target=self._keep_alive, name="elastrata-ownership", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> Owner:
        """The owner as last written, or as last tried, with its newest heartbeat."""
        return self._owner

    @property
    def is_lost(self) -> bool:
        """Whether another driver has taken the run over; then nothing may be written into it."""
        return self._was_lost.is_set()

    def note(self, newest: NewestStep) -> None:
        """Set the newest step that the next heartbeat reports."""
        self._newest = newest

    def release(self) -> None:
        """Release the run, waiting at most some seconds for storage."""
        self._ending.set()
        self._thread.join(_CLOSING_SECONDS)

    def _keep_alive(self) -> None:
        """Write heartbeats until the run is released or lost."""
        # All writing is done here, so that no late beat can undo the release.
        # The first check is early: two drivers that started together on a store without locks both
        # may believe that they are alone.
        wait = min(_FIRST_LOOK_SECONDS, self._owner.beat_seconds)
        while not self._ending.wait(wait):
            wait = self._owner.beat_seconds
            self._beat()
            if self.is_lost:
                return
        self._beat(released=True)

    def _beat(self, *, released: bool = False) -> None:
        """Write the next heartbeat, unless the file belongs to another driver by now."""
        changed = {
            "beat": self._owner.beat + 1,
            "time": time.time(),
            "released": released,
            "newest": self._newest,
        }
        self._owner = self._owner.model_copy(update=changed)
        try:
            rival = read_owner(self._run)
            if rival is None or rival.token == self._owner.token:
                # A missing file is written anew: a user may have deleted it by mistake.
                _write(self._run, self._owner)
                return
        except Exception:  # unreachable storage or a damaged file: the next beat retries
            return
        self._was_lost.set()
        self._lost(
            f"{self._run.uri()}: taken over by {rival}; this driver was considered dead; it ends "
            "and writes nothing more"
        )


@contextmanager
def own_run(
    run: Storage,
    *,
    lost: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
    beat_seconds: float = BEAT_SECONDS,
) -> Iterator[Ownership]:
    """Run the block as the only driver of a run.

    Args:
        run: the run's folder; it need not exist.
        lost: called once with one line, from a background thread, if another driver takes the run
            over because this process was suspended or could not reach the storage. It must make
            sure that this process writes nothing more into the run.
        warn: called with one line before waiting, and before taking over from a dead driver.
        beat_seconds: interval between two heartbeats.

    Raises:
        UserError: another driver works on the run, or the storage cannot be read or written.
    """
    with _storage_errors(run, "read"):
        # Looked at without the lock: watching a foreign driver takes several heartbeats.
        previous_owner = read_owner(run)
    if previous_owner and not previous_owner.released:
        _refuse_if_alive(run, previous_owner, warn)
    own_record = _this_process(beat_seconds).model_copy(update={"folder": run.uri()})
    with _storage_errors(run, "written"), run.hold_lock() as is_alone:
        rival = read_owner(run)
        # The owner may have changed since the first look.
        if not is_alone or (rival and not rival.released and rival.token != _token(previous_owner)):
            raise UserError(
                _in_use_message(run, rival)
                if rival
                else f"{run.uri()}: another command is starting it"
            )
        _write(run, own_record)
        # Read back what storage has kept: of two simultaneous writers the later one wins.
        winner = read_owner(run)
    if winner and winner.token != own_record.token:  # only in a remote store, which has no lock
        raise UserError(_in_use_message(run, winner))
    ownership = Ownership(run, own_record, lost)
    try:
        yield ownership
    finally:
        ownership.release()


def read_owner(run: Storage) -> Owner | None:
    """Return the run's current or last driver; None if it never had one.

    Raises:
        UserError: the file is damaged.
    """
    try:
        owner = read_record(Owner, run, DRIVER_FILE)
        return owner.model_copy(update={"released": True}) if _is_copied(run, owner) else owner
    except FileNotFoundError:
        return None
    except UnreadableError:
        raise
    except UserError as error:
        advice = "delete it when no driver of this run is alive"
        raise UserError(*(f"{line}; {advice}" for line in error.problems)) from None


def _is_copied(run: Storage, owner: Owner) -> bool:
    """Return whether the file describes the driver of another folder, of which this is a copy."""
    # Only local files can be compared with `samefile`.
    if owner.folder in (None, run.uri()) or not run.is_local:
        return False
    original = Path(owner.folder, DRIVER_FILE)
    # A folder that is reached by two paths, for example through a link, is not a copy.
    return original.exists() and not original.samefile(run.path(DRIVER_FILE))


def _token(owner: Owner | None) -> str | None:
    return owner.token if owner else None


def owner_is_alive(run: Storage) -> bool | None:
    """Return whether a driver works on the run, as far as a single look shows.

    Returns:
        True or False if the owner's process is visible, and False if no driver owns the run. For a
        driver on another host: True if its newest heartbeat is recent by this host's clock, else
        None.

    Raises:
        UserError: the file is damaged.
    """
    owner = read_owner(run)
    if owner is None or owner.released:
        return False
    if (is_alive := owner.lives) is not None:
        return is_alive
    # A recent heartbeat proves life; an old one proves nothing, as clocks of hosts differ.
    return abs(time.time() - owner.time) <= FRESH_BEATS * owner.beat_seconds or None


def stop_driver(run: Storage, show: Callable[[str], None]) -> None:
    """End the driver of a run, a process of this machine, as Ctrl-C does, and wait for its end.

    Args:
        run: the folder of a run or a sweep.
        show: called with a line about the driver that is waited for.

    Raises:
        UserError: no driver works there, or it cannot be stopped from here.
    """
    owner = read_owner(run)
    if owner is None or owner.released:
        raise UserError(f"{run.uri()}: no driver works on it, so there is nothing to stop")
    if owner.lives is None:
        raise UserError(
            f"{run.uri()}: driven by {owner}, which cannot be seen from here; stop it there, or "
            "give the --cluster that runs it as a job"
        )
    if not owner.lives:
        raise UserError(f"{run.uri()}: its driver ({owner}) is dead, so there is nothing to stop")
    try:
        os.kill(owner.pid, signal.SIGTERM)
    except ProcessLookupError:  # it ended just now
        return
    except PermissionError:
        raise UserError(f"{run.uri()}: driven by {owner}, of another user") from None
    show(f"{run.uri()}: driven by {owner}; waiting until it has saved its state and ended")
    while owner.lives:
        # A notebook lives on when its run has ended.
        now = read_owner(run)
        if now is None or now.released or now.token != owner.token:
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The known facts about the process that drives a run."""

    alive: bool | None = None
    """None if unknown."""
    since: float = 0.0
    """Unix time at which it became the owner."""
    seen: float = 0.0
    """Unix time of its last heartbeat."""
    newest: NewestStep | None = None
    """The newest step that it reported."""
    token: str | None = None
    """Identifier of its launch."""
    released: bool = False
    """Whether it has ended and released the run."""


def read_driver(run: Storage) -> Driver:
    """Return the known facts about a run's driver; a damaged file counts as no driver."""
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
    """Return the problems of `driver.json`, one line each."""
    try:
        read_owner(run)
    except UserError as error:
        return error.problems
    return ()


def _refuse_if_alive(run: Storage, owner: Owner, warn: Callable[[str], None]) -> None:
    """Return if the recorded owner is dead; watch its heartbeats if its process is not visible.

    Raises:
        UserError: the owner is alive.
    """
    lives = owner.lives
    if lives is None:
        seconds = WATCHED_BEATS * owner.beat_seconds
        warn(f"{run.uri()}: driven by {owner}; watching for {seconds:g} s whether it is alive")
        with _storage_errors(run, "read"):
            lives = _still_beats(run, owner, seconds)
    if lives:
        raise UserError(_in_use_message(run, owner))
    warn(f"{run.uri()}: its driver ({owner}) is dead; taking over")


def _still_beats(run: Storage, owner: Owner, seconds: float) -> bool:
    """Return whether the counter changes within `seconds`."""
    # Only changes of the counter count: the clocks of two hosts are never compared.
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(owner.beat_seconds / 5)
        current_owner = read_owner(run)
        if current_owner is None or current_owner.released:
            return False
        if (current_owner.token, current_owner.beat) != (owner.token, owner.beat):
            return True
    return False


def _in_use_message(run: Storage, owner: Owner) -> str:
    """Return the message about a run that another driver owns."""
    return (
        f"{run.uri()}: driven by {owner}; wait until it ends, stop it (elastrata stop, or kill "
        f"{owner.pid} there), or choose another --name"
    )


def _write(run: Storage, owner: Owner) -> None:
    run.write(owner.model_dump_json(indent=1).encode(), DRIVER_FILE)


@contextmanager
def _storage_errors(run: Storage, what: str) -> Iterator[None]:
    """Turn any storage error into a `UserError` of one line."""
    try:
        yield
    except UnreadableError as error:
        raise UserError(f"{run.uri(DRIVER_FILE)}: cannot be {what} ({error})") from None
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{run.uri(DRIVER_FILE)}: cannot be {what} ({reason})") from error


def _this_process(beat_seconds: float) -> Owner:
    """Return an owner's record of the calling process."""
    now, process = time.time(), this_process()
    return Owner(
        # PIDs and host names repeat; a random token does not.
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot_id=process.boot_id if process else None,
        pid_namespace=process.pid_namespace if process else None,
        pid=os.getpid(),
        # PIDs are reused: only with its start time does a PID identify a process.
        process_start=process.start if process else None,
        since=now,
        beat_seconds=beat_seconds,
        time=now,
    )
