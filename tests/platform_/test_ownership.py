"""One driver per run: real processes that are killed, stopped, and started at the same moment.

Run as a script, this file is a driver: `test_ownership.py RUN BEAT_SECONDS [BOOT_ID [stops]]`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from elastrata.cli.main import run as main_of_commands
from elastrata.run import ownership, process
from elastrata.run.ownership import (
    DRIVER_FILE,
    Owner,
    own_run,
    owner_is_alive,
    read_owner,
    stop_driver,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

BEAT_SECONDS = 0.2
CLOSING_SECONDS = 300.0
"""The limit for the last beat of a driver, on a machine that is very busy."""
ELSEWHERE = "00000000-0000-4000-8000-000000000000"
"""A boot id that no host has: what a driver with it says of itself must be judged by its beats."""


class Driver:
    """A process that owns a run, told to begin and to end by its standard input."""

    def __init__(
        self,
        run: Storage,
        *,
        boot_id: str = "",
        stops: bool = False,
        within: tuple[str, ...] = (),
    ) -> None:
        options = [boot_id, *(["stops"] if stops else [])]
        self.process = subprocess.Popen(
            [*within, sys.executable, __file__, run.url, str(BEAT_SECONDS), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
            },
        )
        self.said: list[str] = []
        self._listener = Thread(target=self._listen)
        self._listener.start()
        assert self.line() == "ready"

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())

    def line(self) -> str:
        """The next line that it says."""
        wait_for(lambda: bool(self.said) or not self._listener.is_alive())
        return self.said.pop(0)

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def begin(self) -> str:
        """Has it own the run, and returns its answer."""
        self.say("begin")
        return self.line()

    def kill(self) -> None:
        """Ends it. It stays a zombie until somebody asks how it ended."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self._listener.join()
        self.process.stdin.close()
        self.process.stdout.close()


Start = Callable[..., Driver]


@pytest.fixture
def start(run: Storage) -> Iterator[Start]:
    """Starts drivers of the run; those that are left at the end are killed."""
    drivers: list[Driver] = []

    def started(**options: Any) -> Driver:
        drivers.append(Driver(run, **options))
        return drivers[-1]

    yield started
    for driver in drivers:
        driver.close()


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage(str(tmp_path / "runs" / "mine"))


@pytest.fixture(autouse=True)
def patient_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_CLOSING_SECONDS", CLOSING_SECONDS)


@pytest.fixture
def endless_watch(run: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's clocks stand still: it watches a driver elsewhere until that one beats, and
    the newest beat is always recent."""
    clocks = SimpleNamespace(
        time=lambda: owner_of(run).time, monotonic=lambda: 0.0, sleep=time.sleep
    )
    monkeypatch.setattr(ownership, "time", clocks)


def owner_of(run: Storage) -> Owner:
    owner = read_owner(run)
    assert owner is not None
    return owner


def wait_for(condition: Callable[[], bool]) -> None:
    """Polls; the test's own limit of time ends it where the condition never comes."""
    while not condition():
        time.sleep(0.01)


@pytest.mark.parametrize("reaped", [True, False], ids=["gone", "zombie"])
def test_a_killed_driver_is_taken_over_at_once(run: Storage, start: Start, reaped: bool) -> None:
    first = start()
    assert first.begin() == "owns"
    dead = owner_of(run)
    assert owner_is_alive(run) is True
    first.kill()
    if reaped:
        first.process.wait()
    assert owner_is_alive(run) is False

    heard: list[str] = []
    with own_run(run, lost=pytest.fail, warn=heard.append) as mine:
        assert mine.owner.token == owner_of(run).token != dead.token
    assert len(heard) == 1
    assert heard[0].endswith(
        f"(process {first.process.pid} on host {dead.host}, since {since(dead)}"
        ") is dead; taking over"
    )


def since(owner: Owner) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(owner.since))


def test_beside_a_living_driver_another_is_refused(run: Storage, start: Start) -> None:
    first, second = start(), start()
    assert first.begin() == "owns"
    owner = owner_of(run)
    assert second.begin() == (
        f"refused: {run.uri()}: driven by process {first.process.pid} on host {owner.host}, "
        f"since {since(owner)}; wait until it ends, stop it (elastrata stop, or kill "
        f"{first.process.pid} there), or choose another --name"
    )
    assert owner_of(run).token == owner.token
    assert owner_is_alive(run) is True


def test_a_driver_of_this_machine_is_stopped(run: Storage, start: Start) -> None:
    driver = start()
    assert driver.begin() == "owns"
    shown: list[str] = []
    stop_driver(run, shown.append)
    assert driver.process.wait() == -signal.SIGTERM
    assert len(shown) == 1
    assert f"process {driver.process.pid} " in shown[0]
    with pytest.raises(UserError, match=r"its driver \(.*\) is dead, so there is nothing to stop"):
        stop_driver(run, pytest.fail)


def test_a_driver_elsewhere_or_a_former_one_is_not_stopped(
    run: Storage, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="no driver works on it"):
        stop_driver(run, pytest.fail)
    driver = start(boot_id=ELSEWHERE)
    assert driver.begin() == "owns"
    assert main_of_commands(["stop", run.url]) == 2
    line = capsys.readouterr().err
    assert f"process {driver.process.pid} on host {owner_of(run).host}" in line
    assert "cannot be seen from here; stop it there, or give the --cluster" in line
    assert driver.process.poll() is None
    driver.say("end")
    assert driver.line() == "ended"
    with pytest.raises(UserError, match="no driver works on it"):
        stop_driver(run, pytest.fail)


def test_a_trial_is_stopped_with_its_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = tmp_path / "a sweep" / "trials" / "0003"
    trial.mkdir(parents=True)
    for place in (trial / "driver.json", tmp_path / "a sweep" / "sweep.yaml"):
        place.write_text("{}", encoding="utf-8")
    assert main_of_commands(["stop", str(trial)]) == 2
    command = f"elastrata stop '{tmp_path / 'a sweep'}'"
    assert capsys.readouterr().err.endswith(f"stop the sweep: {command}\n")


@pytest.mark.usefixtures("endless_watch")
def test_a_driver_elsewhere_that_beats_is_left_alone(run: Storage, start: Start) -> None:
    first = start(boot_id=ELSEWHERE)
    assert first.begin() == "owns"
    assert owner_is_alive(run) is True
    heard: list[str] = []
    with (
        pytest.raises(UserError, match=f"driven by process {first.process.pid} "),
        own_run(run, lost=pytest.fail, warn=heard.append),
    ):
        pass
    assert len(heard) == 1
    assert heard[0].endswith("; watching for 0.6 s whether it is alive")


def test_a_driver_elsewhere_that_stands_still_is_taken_over_and_told(
    run: Storage, start: Start
) -> None:
    # It stops itself right after a beat, never between a look and the writing.
    first = start(boot_id=ELSEWHERE, stops=True)
    assert first.begin() == "owns"
    os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)
    heard: list[str] = []
    with own_run(run, lost=pytest.fail, warn=heard.append, beat_seconds=BEAT_SECONDS) as mine:
        assert [line.split("; ")[-1] for line in heard] == [
            "watching for 0.6 s whether it is alive",
            "taking over",
        ]
        first.process.send_signal(signal.SIGCONT)
        assert first.line() == (
            f"lost: {run.uri()}: taken over by {mine.owner}; this driver was considered dead; it "
            "ends and writes nothing more"
        )
        first.say("end")
        assert first.line() == "ended, is lost"
        first.process.wait()
        assert first.said == []
        assert owner_of(run).token == mine.owner.token
        assert not owner_of(run).released
        assert not mine.is_lost


def test_of_drivers_that_start_at_the_same_moment_one_stays(run: Storage, start: Start) -> None:
    drivers = [start() for _ in range(4)]
    for driver in drivers:
        driver.say("begin")

    def staying() -> list[Driver]:
        return [driver for driver in drivers if driver.said[-1:] == ["owns"]]

    wait_for(lambda: all(driver.said for driver in drivers) and len(staying()) == 1)
    assert owner_of(run).pid == staying()[0].process.pid
    others = [driver.said[-1].split(":")[0] for driver in drivers if driver not in staying()]
    assert set(others) <= {"refused", "lost"}


def test_storage_that_is_away_for_a_while_is_borne(tmp_path: Path) -> None:
    def lead_to(target: str) -> None:
        (tmp_path / "new").symlink_to(tmp_path / target)
        (tmp_path / "new").replace(tmp_path / "runs")

    (tmp_path / "disk").mkdir()
    (tmp_path / "no folder").touch()
    lead_to("disk")
    run = Storage(str(tmp_path / "runs" / "mine"))
    with own_run(run, lost=pytest.fail, beat_seconds=0.02) as mine:
        lead_to("no folder")
        before = mine.owner.beat
        wait_for(lambda: mine.owner.beat > before + 3)
        lead_to("disk")
        reached = mine.owner.beat
        wait_for(lambda: owner_of(run).beat > reached)
    assert owner_of(run).released


def test_a_damaged_file_is_told(run: Storage) -> None:
    run.write(b'{"token": ', DRIVER_FILE)
    with (
        pytest.raises(UserError, match=r"driver\.json: not JSON .*; delete it when no driver"),
        own_run(run, lost=pytest.fail),
    ):
        pass


def main(url: str, beat_seconds: str, boot_id: str = "", stops: str = "") -> None:
    """A driver that does what its standard input says."""
    ownership._CLOSING_SECONDS = CLOSING_SECONDS
    if boot_id:
        process.host_identity = lambda: (boot_id, "pid:[1]")
    is_heard = Event()
    if stops:
        stop_after_beat(is_heard)
    tell = partial(print, flush=True)
    tell("ready")
    assert input() == "begin"
    try:
        with own_run(
            Storage(url),
            lost=lambda text: tell(f"lost: {text}"),
            beat_seconds=float(beat_seconds),
        ) as mine:
            tell("owns")
            is_heard.set()
            assert input() == "end"
    except UserError as error:
        tell(f"refused: {error}")
    else:
        tell("ended, is lost" if mine.is_lost else "ended")


def stop_after_beat(may_stop: Event) -> None:
    """Make this process stop itself, once, right after a beat."""
    beat = ownership.Ownership._beat

    def beat_and_stop(self: ownership.Ownership, **options: bool) -> None:
        beat(self, **options)
        if may_stop.is_set():
            ownership.Ownership._beat = beat
            os.kill(os.getpid(), signal.SIGSTOP)

    ownership.Ownership._beat = beat_and_stop


if __name__ == "__main__":
    main(*sys.argv[1:])
