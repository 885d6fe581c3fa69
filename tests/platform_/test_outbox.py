"""The outbox: in order, again and again, and never longer than it may."""

from __future__ import annotations

from threading import Event

import pytest

from elastrata.tracking import tracker as module
from elastrata.tracking.tracker import Outbox

SECONDS = 300.0
"""The limit of a wait that ends early."""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_WAIT_SECONDS", 0.01)


def test_actions_run_in_order_through_failures() -> None:
    done: list[int] = []
    failures = {3: 2}

    def action(number: int) -> None:
        if failures.get(number):
            failures[number] -= 1
            raise ConnectionError("not now")
        done.append(number)

    outbox = Outbox("the store", lambda error: False)
    for number in range(6):
        outbox.put(lambda number=number: action(number))
    assert outbox.close(SECONDS) == 0
    assert done == list(range(6))


def test_what_is_hopeless_is_dropped() -> None:
    done: list[int] = []

    def refuse() -> None:
        raise ValueError("never")

    outbox = Outbox("the store", lambda error: isinstance(error, ValueError))
    outbox.put(refuse)
    outbox.put(lambda: done.append(1))
    assert outbox.close(SECONDS) == 0
    assert done == [1]


def test_closing_ends_in_time_and_says_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    attempts: list[None] = []
    is_tried_again = Event()

    def fail() -> None:
        attempts.append(None)
        if len(attempts) > 1:
            is_tried_again.set()
        raise ConnectionError("gone")

    outbox = Outbox("the store", lambda error: False)
    for _ in range(3):
        outbox.put(fail)
    assert is_tried_again.wait(SECONDS)
    assert outbox.close(0.1) == 3
    assert caplog.text.count("the store does not answer") == 1
