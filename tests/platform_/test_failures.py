"""The failures of a launch: counted once, and until none is left."""

from __future__ import annotations

from elastrata.cluster.failures import Failures


def test_losses_are_counted_once_an_attempt_until_none_is_left() -> None:
    failures = Failures(2)
    assert (failures.left, failures.is_last) == (2, False)
    assert failures.lose(4)
    assert not failures.lose(4)
    assert (failures.count, failures.left, failures.is_last) == (1, 1, False)
    assert failures.lose(5)
    assert (failures.count, failures.left, failures.is_last) == (2, 0, True)


def test_any_number_of_losses_leaves_any_number() -> None:
    failures = Failures(-1)
    assert all(failures.lose(attempt) for attempt in range(50))
    assert (failures.left, failures.is_last) == (-1, False)
