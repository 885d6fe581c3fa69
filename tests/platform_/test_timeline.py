"""The timeline: whatever clocks do, no second is negative, counted twice or lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.run.goodput import goodput, time_to_target
from elastrata.run.ownership import Driver
from elastrata.run.status import run_state, seconds_in_all, summary
from elastrata.run.timeline import recoveries
from elastrata.step.target import TargetConfig
from support.clocks import BEGAN, Life, check_account, check_status
from support.histories import Entry, said, started, stepped
from support.lone_run import lone_run

GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 48}
TARGET = TargetConfig(metric="eval/loss", at_most=2.5)
SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.integers(1, 3), st.booleans())
def test_the_parts_are_the_whole_whatever_clocks_do(
    seed: int, hosts: int, has_readings: bool
) -> None:
    life = Life(random.Random(seed), hosts=hosts, has_readings=has_readings)
    found = summary(
        "runs/one",
        life.entries,
        steps_in_all=99,
        target=TARGET,
        checkpoint=None,
        driver=Driver(),
        now=BEGAN,
    )
    check_status(found)
    measured = sum(e["seconds"] for e in life.entries if e["kind"] in ("step", "evaluated"))
    assert found.seconds_in_all >= measured - 1e-6


@given(SEEDS)
def test_jumps_of_the_wall_clock_change_nothing_on_one_host(seed: int) -> None:
    life = Life(random.Random(seed))
    found = goodput(life.entries).to_metrics(prefix="")
    assert found == pytest.approx({**dict.fromkeys(found, 0.0), **life.uses}, abs=1e-3)


def test_an_evaluation_before_the_first_step_is_counted_once() -> None:
    """A run with `begin_with` had 63% starting and 59% evaluating, and a negative rest."""
    entries = [
        started(1, 0, time=100.0, seconds={"model": 2.0}),
        said("evaluated", 1, time=160.0, step=0, seconds=59.0, **{"eval/loss": 3.0}),
        stepped(1, 1, time=162.0),
        said("evaluated", 1, time=170.0, step=1, seconds=8.0, **{"eval/loss": 2.0}),
        said("ended", 1, time=171.0, status="FINISHED"),
    ]
    found = goodput(entries)
    check_account(found, seconds_in_all(entries))
    assert found.evaluating == 67.0
    assert found.starting == {"model": 2.0, "first_step": 2.0}
    assert (found.steps, found.ending, found.other) == (1.0, 1.0, 0.0)
    assert found.total == 73.0


def _launches(again: float) -> list[Entry]:
    """A run that was stopped, launched again, and finished; the second time by a clock that is off
    by `again` seconds."""
    first, second = BEGAN, BEGAN + again
    return [
        started(1, 0, time=first),
        stepped(1, 1, time=first + 1),
        said("ended", 1, time=first + 2, status="KILLED", text="SIGTERM", last=1, driver="a"),
        started(2, 1, time=second + 3),
        stepped(2, 2, time=second + 4),
        said("ended", 2, time=second + 5, status="FINISHED", text="", last=2, driver="b"),
    ]


@pytest.mark.parametrize("off", [0.0, 5_000.0, -5_000.0])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_finished_run_is_finished_though_the_clock_was_set_back(off: float, is_old: bool) -> None:
    entries = _launches(off)
    if is_old:
        old = ("last", "driver")
        entries = [{key: v for key, v in e.items() if key not in old} for e in entries]
    for now in (BEGAN - 9_000, BEGAN + 9_000):
        for driver in (Driver(), Driver(alive=False, seen=BEGAN, released=True)):
            state = run_state(entries, done=True, driver=driver, now=now)
            assert state == ("finished", "finished")
    check_account(goodput(entries), seconds_in_all(entries))


def test_a_launch_is_told_from_the_one_before_by_its_name() -> None:
    stopped = _launches(0.0)[:3]
    same = Driver(alive=True, since=BEGAN + 9_000, token="a")
    assert run_state(stopped, done=False, driver=same, now=BEGAN)[0] == "stopped"
    other = Driver(alive=True, since=BEGAN - 9_000, token="b")
    assert run_state(stopped, done=False, driver=other, now=BEGAN)[0] == "running"
    begun = [*stopped, started(2, 1, time=BEGAN - 9_000)]
    assert run_state(begun, done=False, driver=Driver(alive=False), now=BEGAN)[0] == "silent"


def test_the_time_to_target_has_its_pauses_and_no_jump() -> None:
    entries = [
        started(1, 0, time=BEGAN),
        stepped(1, 1, time=BEGAN + 1),
        said("ended", 1, time=BEGAN + 2, status="KILLED", last=1),
        started(2, 1, time=BEGAN + 102, seconds={"model": 3.0}),
        stepped(2, 2, time=BEGAN + 103),
        said("evaluated", 2, time=BEGAN - 9_000, step=2, seconds=4.0, **{"eval/loss": 2.0}),
    ]
    found = time_to_target(entries, TARGET)
    assert (found.seconds, found.seconds_in_steps) == (107.0, 2.0)


def test_a_recovery_is_never_shorter_than_what_was_measured_in_it() -> None:
    entries = [
        started(1, 0, time=BEGAN),
        stepped(1, 1, time=BEGAN + 1),
        said("fault", 1, time=BEGAN + 2),
        started(2, 0, time=BEGAN - 500, seconds={"model": 3.0}),
        stepped(2, 1, time=BEGAN - 498),
    ]
    (recovery,) = recoveries(entries)
    assert recovery.seconds == 3.0 + 1.0 + 1.0


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with the weights of another one, while its clock was set back and forth."""
    folder, rng, whole = tmp_path_factory.mktemp("begun"), random.Random(0), time.time
    parent = lone_run(folder, "parent", workload=GPT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: whole() + rng.choice((-3_600, 0, 3_600)))
        return lone_run(folder, "child", workload=GPT, begin_with=f"{parent}@2")
