"""Backoff: growing distances, a limit, and a clean start after a success."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines import retry as module
from elastrata_pipelines.checked_json import UnreadableError
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.retry import (
    FIRST_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    Backoff,
    retry_storage_action,
)

NOW = st.floats(0, 1e9)


def after(failures: int, now: float = 0.0) -> Backoff:
    backoff = Backoff()
    for _ in range(failures):
        backoff = backoff.after_failure(now)
    return backoff


@given(NOW)
def test_without_a_failure_nothing_is_due(now: float) -> None:
    assert not Backoff().is_retry_due(now)


@given(st.integers(1, 2000), NOW)
def test_due_when_the_distance_from_the_newest_failure_is_over(failures: int, now: float) -> None:
    backoff = after(failures - 1).after_failure(now)
    assert backoff.failures == failures
    assert FIRST_PAUSE_SECONDS <= backoff.seconds <= LONGEST_PAUSE_SECONDS
    assert not backoff.is_retry_due(now)
    assert not backoff.is_retry_due(now + backoff.seconds - 1)
    assert backoff.is_retry_due(now + backoff.seconds)


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    answers = iter([OSError("away"), UnreadableError("still away"), "there"])
    warned: list[str] = []

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry_storage_action(ask, "the state", warned.append) == "there"
    assert warned == [
        "the state cannot be read, tried again in 0.001 s: away",
        "the state cannot be read, tried again in 0.002 s: still away",
    ]


def test_patience_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.01)

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        retry_storage_action(fail, "the state", lambda _: None)

    def refuse() -> None:
        raise UserError("wrong")

    with pytest.raises(UserError):
        retry_storage_action(
            refuse, "the state", lambda _: pytest.fail("a user's mistake stays one")
        )
