"""Goodput: every second of a run, by what it went into."""

from __future__ import annotations

import pytest

from elastrata.run.goodput import Goodput, goodput
from elastrata.run.status import seconds_in_all
from support.histories import Entry, started, stepped

PHASES = {"model": 2.0, "data": 1.0}


def of_driver(kind: str, attempt: int, time: float, **more: object) -> Entry:
    return {"kind": kind, "attempt": attempt, "time": time, **more}


def disturbed() -> list[Entry]:
    """Two steps, an evaluation and a save between them, a fault that undoes the second, a planned
    change, an end and another driver: every kind of second."""
    return [
        started(1, 0, time=100.0, seconds=PHASES),
        stepped(1, 1, time=101.5, seconds_waiting_for_data=0.25),
        of_driver("evaluated", 1, 102.0, step=1, seconds=0.5),
        stepped(1, 2, time=103.25),
        of_driver("fault", 1, 104.0),
        started(2, 1, time=110.0, seconds=PHASES),
        of_driver("rolled_back", 2, 110.0, first=2, last=2),
        stepped(2, 2, time=111.0),
        of_driver("halted", 2, 112.0, step=2, reason="resize", text=""),
        started(3, 2, time=116.0, seconds=PHASES),
        stepped(3, 3, time=117.0),
        of_driver("halted", 3, 117.5, step=3, reason="stop", text=""),
        of_driver("ended", 3, 118.0, status="KILLED", text=""),
        started(4, 3, time=1000.0, seconds=PHASES),
        stepped(4, 4, time=1001.0),
        of_driver("ended", 4, 1003.0, status="FINISHED", text=""),
    ]


def test_every_second_is_accounted_for_once() -> None:
    account = goodput(disturbed())
    assert account == Goodput(
        steps=4 - 0.25,
        waiting_for_data=0.25,
        done_again=1.0,
        evaluating=0.5,
        saving=0.25,
        starting={"model": 8.0, "data": 4.0, "first_step": 0.5},
        recovering=110 - 3 - 103.25,
        halted=116 - 3 - 111 + (118 - 117),
        ending=2.0,
        other=pytest.approx(0.0, abs=1e-9),
    )
    assert account.total == pytest.approx(seconds_in_all(disturbed()))
    assert account.share == pytest.approx(3.75 / account.total)


def test_a_driver_that_died_is_told_from_a_group_that_was_lost() -> None:
    entries = [
        started(1, 0, time=10.0, seconds=PHASES),
        stepped(1, 1, time=11.0),
        of_driver("ended", 1, 12.0, status="FAILED", text="the disk is full"),
        started(2, 1, time=30.0, seconds=PHASES),
        stepped(2, 2, time=31.0),
    ]
    account = goodput(entries)
    assert account.recovering == 0.0
    assert account.restarting == 1.0, "until the end was told"
    assert account.other == pytest.approx(0.0, abs=1e-9)
