"""The ownership of a run: at most one driver works on it; `docs/faults.md` says how that is kept.

The owner's process writes `driver.json` into the run's folder again every few seconds, with a
counter that grows. Storage that many hosts share knows no lock that works everywhere, so a second
driver looks at the process where it can, and else at whether the counter still moves.
"""

from __future__ import annotations

import os
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
"""The file is written this often."""
WATCHED_BEATS = 3
"""A driver that nothing can be seen of but its file is dead when it misses this many beats."""
FRESH_BEATS = 4
"""A file no older than this many beats is, for a first look, that of a living driver."""
_FIRST_LOOK_SECONDS = 1.0
"""How soon the owner looks at its file again: a rival that started at the same moment shows."""
_CLOSING_SECONDS = 10.0
"""How long the end of a run waits for storage to take the last word."""

Time = Annotated[float, Field(ge=0, lt=2**37, allow_inf_nan=False)]


class NewestStep(BaseModel):
    """The newest step that the owner has heard of; the history has it some seconds later."""

    model_config = ConfigDict(frozen=True)

    step: NonNegativeInt
    samples: NonNegativeInt
    tokens: NonNegativeInt
    loss: Annotated[float, Field(allow_inf_nan=False)] | None
    """None: not finite."""


class Owner(BaseModel):
    """Who drives a run; what `driver.json` says."""

    model_config = ConfigDict(frozen=True)

    token: str
    """Random; another one for every launch."""
    host: str
    boot_id: str | None
    """The host's boot id, new at every start; None where its system has none."""
    pid_namespace: str | None
    """The namespace that `pid` counts in: containers of one host share its boot id, not its process
    ids."""
    pid: Annotated[PositiveInt, Field(lt=2**31)]
    process_start: NonNegativeInt | None
    """Clock ticks from the host's start to that of the process: it tells two processes of one pid
    apart."""
    since: Time
    """Unix time, by the host's own clock, at which it became the owner."""
    beat: NonNegativeInt = 0
    """Grows from one writing of the file to the next."""
    beat_seconds: Annotated[PositiveFloat, Field(le=60.0)]
    """How often the file is written."""
    time: Time
    """Unix time, by the host's own clock, of the newest beat."""
    released: bool = False
    """Whether it has ended and said so."""
    folder: str | None = None
    """The folder that it owns: a copy of this file in another folder owns nothing. None: written by
    an earlier version."""
    newest: NewestStep | None = None
    """None: no step yet."""

    @property
    def process(self) -> Process | None:
        """The process; None where its system did not show what tells it apart."""
        if self.boot_id is None or self.pid_namespace is None or self.process_start is None:
            return None
        return Process(self.boot_id, self.pid_namespace, self.pid, self.process_start)

    @property
    def lives(self) -> bool | None:
        """Whether the process exists; None where this one cannot see that."""
        return self.process.lives() if self.process else None

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on host {self.host}, since {since}"


class Ownership:
    """A run that this process drives, until the block of `own_run` ends or the run is lost."""

    def __init__(self, run: Storage, owner: Owner, lost: Callable[[str], None]) -> None:
        self._run, self._owner, self._lost = run, owner, lost
        self._newest: NewestStep | None = None
        self._ending, self._was_lost = Event(), Event()
        self._thread = Thread(target=self._keep, name="elastrata-ownership", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> Owner:
        """The owner's file, as this process writes it, or tries to, with its newest beat."""
        return self._owner

    @property
    def is_lost(self) -> bool:
        """Whether another driver has taken the run over: nothing may be written into it then."""
        return self._was_lost.is_set()

    def note(self, newest: NewestStep) -> None:
        """Takes what the next beat is to say of the run."""
        self._newest = newest

    def release(self) -> None:
        """Gives the run back. Waits some seconds for storage to take that in, but not for ever."""
        self._ending.set()
        self._thread.join(_CLOSING_SECONDS)

    def _keep(self) -> None:
        # All writing is done here, so that no late beat can undo the release.
        wait = min(_FIRST_LOOK_SECONDS, self._owner.beat_seconds)
        while not self._ending.wait(wait):
            wait = self._owner.beat_seconds
            self._beat()
            if self.is_lost:
                return
        self._beat(released=True)

    def _beat(self, *, released: bool = False) -> None:
        """Writes the file anew, unless it is another driver's now."""
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
                _write(self._run, self._owner)
                return
        except Exception:  # storage is away, or damaged: the next beat tries again
            return
        self._was_lost.set()
        self._lost(
            f"{self._run.uri()}: taken over by {rival}; this driver was taken for dead, ends, and "
            "writes nothing more into it"
        )


@contextmanager
def own_run(
    run: Storage,
    *,
    lost: Callable[[str], None],
    warn: Callable[[str], None] = lambda _: None,
    beat_seconds: float = BEAT_SECONDS,
) -> Iterator[Ownership]:
    """Runs its block as the only driver of a run.

    Args:
        run: the run's folder; it need not exist.
        lost: called once, from a thread of its own, with one line, when another driver has taken
            the run over (this process stood still for long, or could not reach the storage). It
            must see to it that this process writes nothing more into the run.
        warn: called with one line before it waits, and when it takes over from a dead driver.
        beat_seconds: how often this driver shows that it lives.

    Raises:
        UserError: another driver works on the run, or the storage cannot be read or written.
    """
    with _told(run, "read"):
        before = read_owner(run)
    if before and not before.released:
        _refuse_beside(run, before, warn)
    me = _this_process(beat_seconds).model_copy(update={"folder": run.uri()})
    with _told(run, "written"), run.exclusive() as is_alone:
        rival = read_owner(run)
        if not is_alone or (rival and not rival.released and rival.token != _token(before)):
            raise UserError(
                _in_use(run, rival) if rival else f"{run.uri()}: another command is beginning there"
            )
        _write(run, me)
        winner = read_owner(run)
    if winner and winner.token != me.token:  # a remote store, which has no lock
        raise UserError(_in_use(run, winner))
    ownership = Ownership(run, me, lost)
    try:
        yield ownership
    finally:
        ownership.release()


def read_owner(run: Storage) -> Owner | None:
    """The driver that a run has, or had last; None where none was ever there.

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
        advice = "delete it once no driver of this run is left"
        raise UserError(*(f"{line}; {advice}" for line in error.problems)) from None


def _is_copied(run: Storage, owner: Owner) -> bool:
    """Return whether the file came with a copy of a folder whose own driver it describes."""
    if owner.folder in (None, run.uri()) or not run.is_local:
        return False
    original = Path(owner.folder, DRIVER_FILE)
    # A folder that is reached by two paths, through a link, has one file.
    return original.exists() and not original.samefile(run.path(DRIVER_FILE))


def _token(owner: Owner | None) -> str | None:
    return owner.token if owner else None


def owner_is_alive(run: Storage) -> bool | None:
    """Whether a driver works on the run, as far as one look can tell.

    Returns:
        True or False where the process can be looked at, or where there is none to look at. Of a
        driver elsewhere: True where its newest beat is recent by this host's clock, else None.

    Raises:
        UserError: the file is damaged.
    """
    owner = read_owner(run)
    if owner is None or owner.released:
        return False
    if (seen := owner.lives) is not None:
        return seen
    return abs(time.time() - owner.time) <= FRESH_BEATS * owner.beat_seconds or None


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


def _refuse_beside(run: Storage, owner: Owner, warn: Callable[[str], None]) -> None:
    """Returns where the owner is dead.

    Raises:
        UserError: it lives.
    """
    lives = owner.lives
    if lives is None:
        seconds = WATCHED_BEATS * owner.beat_seconds
        warn(f"{run.uri()}: driven by {owner}; watching for {seconds:g} s whether that one lives")
        with _told(run, "read"):
            lives = _still_beats(run, owner, seconds)
    if lives:
        raise UserError(_in_use(run, owner))
    warn(f"{run.uri()}: its driver ({owner}) is dead; taking over")


def _still_beats(run: Storage, owner: Owner, seconds: float) -> bool:
    """Whether the file changes within so many seconds. No clocks of two hosts are compared."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(owner.beat_seconds / 5)
        now = read_owner(run)
        if now is None or now.released:
            return False
        if (now.token, now.beat) != (owner.token, owner.beat):
            return True
    return False


def _in_use(run: Storage, owner: Owner) -> str:
    return (
        f"{run.uri()}: driven by {owner}; wait for its end, stop it there (kill {owner.pid}), "
        "or choose another --name"
    )


def _write(run: Storage, owner: Owner) -> None:
    run.write(owner.model_dump_json(indent=1).encode(), DRIVER_FILE)


@contextmanager
def _told(run: Storage, what: str) -> Iterator[None]:
    """Turns whatever a storage raises into one line for the user."""
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
    now, process = time.time(), this_process()
    return Owner(
        token=uuid.uuid4().hex,
        host=socket.gethostname(),
        boot_id=process.boot_id if process else None,
        pid_namespace=process.pid_namespace if process else None,
        pid=os.getpid(),
        process_start=process.start if process else None,
        since=now,
        beat_seconds=beat_seconds,
        time=now,
    )
