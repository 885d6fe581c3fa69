"""Patience and what it is made for: processes that are silent or stopped, told by a clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from elastrata.cluster.patience import Patience
from elastrata.cluster.prestarted import Orders
from elastrata.cluster.processes import children, environment, state, title
from elastrata.cluster.sentry import Sentry, Stops
from support.command import wait_until

JOB = "0a000000"


def looks(patience: Patience, seconds: float, start: float = 0.0) -> bool:
    """Whether it is over after so many seconds with a look every half one."""
    times = [start + 0.5 * number for number in range(int(2 * seconds) + 1)]
    return [patience.is_over(now) for now in times][-1]


def test_silence_is_over_after_so_many_seconds_and_a_sign_ends_it() -> None:
    patience = Patience(10)
    assert not looks(patience, 10)
    assert looks(patience, 1, start=10)
    patience.heard()
    assert not looks(patience, 10, start=11)


def test_who_was_stopped_itself_has_missed_nothing() -> None:
    patience = Patience(10)
    assert not looks(patience, 5)
    assert not patience.is_over(600)
    assert not looks(patience, 2, start=600)
    assert looks(patience, 5, start=602)


def test_what_starts_may_take_longer() -> None:
    patience = Patience(10, 60)
    assert not looks(patience, 50)
    patience.heard()
    assert looks(patience, 11, start=50)
    patience.starts_anew()
    assert not looks(patience, 50, start=61)


def test_only_a_process_that_stays_stopped_is_overdue() -> None:
    stops = Stops(3)
    found = [stops.overdue({1, 2} if now < 2 else {1}, now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)]
    assert [set(pids) for pids in found] == [set(), set(), set(), set(), {1}]
    stops.overdue({2}, 5.0)
    assert not stops.overdue({1, 2}, 6.0), "one that was continued begins anew"


def test_a_stopped_process_of_the_job_is_killed_and_no_other() -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    commands = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "RAY_JOB_ID": job},
            stdout=subprocess.PIPE,
        )
        for job in (JOB, JOB, "0b000000")
    ]
    stopped, running, other = commands
    lines: list[str] = []
    try:
        for command in commands:
            assert command.stdout
            command.stdout.readline()
        for command in (stopped, other):
            command.send_signal(signal.SIGSTOP)
        sentry = Sentry(os.getpid, JOB, 0.5, lines.append)
        assert stopped.wait(60) == -signal.SIGKILL
        assert wait_until(lambda: lines, 10, "a line")[0].endswith("killed")
        sentry.close()
        assert running.poll() is None
        assert other.poll() is None
        assert state(Path("/proc") / str(other.pid)) == "T"
    finally:
        for command in commands:
            command.kill()
            command.wait()
            assert command.stdout
            command.stdout.close()


def test_what_is_known_of_a_process() -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    command = subprocess.Popen(
        [sys.executable, "-c", code], env={"RAY_JOB_ID": JOB, "OTHER": "1"}, stdout=subprocess.PIPE
    )
    process = Path("/proc") / str(command.pid)
    try:
        assert command.stdout
        command.stdout.readline()
        assert process in list(children(os.getpid()))
        assert title(process) == sys.executable
        assert environment(process, "RAY_JOB_ID", "MISSING") == {"RAY_JOB_ID": JOB}
    finally:
        command.kill()
        command.wait()
        command.stdout.close()
    assert state(process) == "X"
    assert (title(process), environment(process, "RAY_JOB_ID")) == ("", {})


def test_spares_are_asked_for_one_at_a_time() -> None:
    orders = Orders(2)
    assert orders.is_due((), (), now=0)
    assert not orders.is_due((), (), now=1)
    assert not orders.is_due((), (11,), now=2), "it has yet to start"
    assert orders.is_due((11,), (), now=5)
    assert not orders.is_due((11,), (12,), now=6)
    assert not orders.is_due((11, 12), (), now=7)
    assert orders.is_due((12,), (), now=8), "an actor has taken one"


def test_a_spare_that_does_not_come_is_asked_for_again_after_a_minute() -> None:
    orders = Orders(3)
    asked = [now for now in range(200) if orders.is_due((), (), now=now)]
    assert asked == [0, 60, 120, 180]
