"""Liveness: workers that are silent, by a clock; processes; when spares are asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from elastrata.cluster.hang_detection import (
    NO_ANSWER,
    EventsReceived,
    HangDetector,
    HeartbeatTimeout,
    Kill,
    Killed,
    Report,
    TimeoutCheck,
)
from elastrata.cluster.prestarted import SpareRequests, count_affordable
from elastrata.cluster.processes import children, environment, state, title
from elastrata.step.events import Event, Halted, Lost, Started, Warned
from support.hung_ranks import WAITED_FOR, wait_for_a_peer
from support.ranks import run_ranks

JOB = "0a000000"
PIDS = {0: ("node a", 100), 1: ("node b", 200)}


def looks(timeout: HeartbeatTimeout, seconds: float, start: float = 0.0) -> bool:
    """Whether it is over after so many seconds with a look every half one."""
    times = [start + 0.5 * number for number in range(int(2 * seconds) + 1)]
    return [timeout.is_over(now) for now in times][-1]


def test_silence_is_over_after_so_many_seconds_and_a_beat_ends_it() -> None:
    timeout = HeartbeatTimeout(10)
    assert not looks(timeout, 10)
    assert looks(timeout, 1, start=10)
    timeout.beat()
    assert not looks(timeout, 10, start=11)


def test_who_was_stopped_itself_has_missed_nothing() -> None:
    timeout = HeartbeatTimeout(10)
    assert not looks(timeout, 5)
    assert not timeout.is_over(600)
    assert not looks(timeout, 2, start=600)
    assert looks(timeout, 5, start=602)


class Group:
    """A group of workers, as the driver hears of it; the clock stands until a test moves it."""

    def __init__(self, seconds: float) -> None:
        self.liveness = HangDetector(seconds)
        self.now = 0.0

    def hears(self, *events: Event) -> None:
        self.liveness.handle(EventsReceived(events), self.now)

    def silent(self, seconds: float) -> list[Kill | Report]:
        """What is done while no event comes for so long."""
        done = []
        for _ in range(int(seconds)):
            self.now += 1
            self.hears()
            done += self.liveness.handle(TimeoutCheck(), self.now)
        return done

    def killed(self, kill: Kill, states: dict[int, str]) -> list[Kill | Report]:
        return self.liveness.handle(Killed(kill, states), self.now)


def started() -> Started:
    return Started(attempt=1, world_size=2, step=0, state="new", pids=PIDS, seconds={})


def test_a_group_that_sends_nothing_is_killed_once() -> None:
    group = Group(10)
    assert group.silent(30) == [], "nobody is there to be killed"
    group.hears(started())
    assert group.silent(10) == []
    (kill,) = group.silent(5)
    assert kill == Kill(PIDS, 11.0)
    (report,) = group.killed(kill, {0: "S", 1: "T"})
    text = "no progress by the workers for 11 s: killed; stopped: rank 1"
    assert report == Report(Lost(text=text, ranks=(1,)))
    assert group.silent(30) == []
    traces = {1: "traces/rank-1", 0: "traces/rank-0"}
    (report,) = group.liveness.handle(Killed(kill, {0: "S", 1: "S"}, traces), group.now)
    assert isinstance(report, Report)
    assert report.lost.text.endswith(
        ": killed; last collectives: traces/rank-0 on the node of rank 0 and 1 more"
    )


def test_any_event_is_a_sign_and_a_halted_or_lost_group_owes_none() -> None:
    group = Group(10)
    group.hears(started())
    for _ in range(5):
        assert group.silent(9) == []
        group.hears(Warned(text="the state is still being saved"))
    group.hears(Halted(step=5, reason="resize", text="2 -> 3 workers"))
    assert group.silent(60) == []
    group.hears(started(), Lost(text="rank 0: gone", ranks=(0,)))
    assert group.silent(60) == []


def test_what_a_node_that_does_not_answer_runs_is_killed_again_unless_others_have_started() -> None:
    group = Group(10)
    group.hears(started())
    (kill,) = group.silent(11)
    assert isinstance(kill, Kill)
    group.killed(kill, {0: "X", 1: NO_ANSWER})
    (again,) = group.silent(1)
    assert again == Kill({1: PIDS[1]}, 12.0)
    group.hears(started())
    group.killed(kill, {0: "X", 1: NO_ANSWER})
    (kill,) = group.silent(11)
    assert isinstance(kill, Kill)
    assert kill.pids == PIDS


def test_nothing_is_missed_while_nobody_could_hear_it() -> None:
    group = Group(10)
    group.hears(started())
    for _ in range(60):
        group.now += 1
        assert group.liveness.handle(TimeoutCheck(), group.now) == []


def test_a_rank_that_waits_writes_which_collective_it_waits_for(tmp_path: Path) -> None:
    waiting, timeouts = run_ranks(2, wait_for_a_peer, f"{tmp_path}/rank-")[0]
    assert waiting["profiling_name"] == "gloo:all_reduce"
    assert waiting["input_sizes"] == [[WAITED_FOR]]
    # Of the whole group and of one along an axis; the latter has PyTorch's default otherwise.
    assert timeouts == [timedelta(seconds=2 * 3000)] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0"]


def test_what_is_known_of_a_process() -> None:
    code = "import time; print(flush=True); time.sleep(600)"
    command = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_JOB_ID": JOB},
        stdout=subprocess.PIPE,
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
    orders = SpareRequests(2)
    assert orders.is_due((), (), now=0)
    assert not orders.is_due((), (), now=1)
    assert not orders.is_due((), (11,), now=2), "it has yet to start"
    assert orders.is_due((11,), (), now=5)
    assert not orders.is_due((11,), (12,), now=6)
    assert not orders.is_due((11, 12), (), now=7)
    assert orders.is_due((12,), (), now=8), "an actor has taken one"


def test_one_that_was_taken_is_replaced_when_the_group_that_took_it_trains() -> None:
    orders = SpareRequests(2, after=5)
    assert not orders.is_due((), (), now=0)
    assert orders.is_due((), (), now=5)
    assert orders.is_due((11,), (), now=6)
    assert not orders.is_due((11, 12), (), now=7)
    assert [now for now in range(8, 20) if orders.is_due((12,), (), now=now)] == [13]


def test_a_spare_that_does_not_come_is_asked_for_again_after_a_minute() -> None:
    orders = SpareRequests(3)
    asked = [now for now in range(200) if orders.is_due((), (), now=now)]
    assert asked == [0, 60, 120, 180]


def test_spares_are_off_where_they_would_take_more_than_half_of_the_free_memory() -> None:
    assert [count_affordable(4, free) for free in (10 * 10**9, 3 * 10**9)] == [4, 0]
