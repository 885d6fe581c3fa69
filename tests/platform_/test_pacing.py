"""The slow rank is named, within twenty steps, and so is its recovery."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.core.events import Event, Paced, Slowed
from elastrata.core.step_message import Effort
from elastrata.trainer.pacing import Pacing, RankPlace, idle_ranks, medians_of_others
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows

NO_ROWS = Rows(
    sample_ids=np.zeros(0, np.uint64),
    epochs=np.zeros(0, np.int64),
    lengths=np.zeros(0, np.int64),
    tokens=np.zeros(0, np.uint16),
)


def _found(
    devices: list[str],
    true: Callable[[int], np.ndarray],
    *,
    steps: int = 60,
    deals: bool = False,
    data_ranks: list[int] | None = None,
) -> list[Event]:
    """What is told while ranks on those devices train at these paces, with 3% of noise."""
    told: list[Event] = []
    places = [RankPlace(f"id-{n}", f"host-{n}", device) for n, device in enumerate(devices)]
    ranks = data_ranks or list(range(len(devices)))
    pacing, rng = Pacing(places, ranks, deals=deals, tell=told.append), np.random.default_rng(0)
    for step in range(1, steps + 1):
        seconds = 100 / true(step) * np.exp(0.03 * rng.standard_normal(len(devices)))
        rank_step = RankStep(step=step, rows=NO_ROWS, cuts=np.zeros(2, np.int64), imbalance=1.0)
        pacing(rank_step, [Effort(second, 100.0) for second in seconds.tolist()])
    return told


def _paces(*paces: float) -> Callable[[int], np.ndarray]:
    return lambda step: np.array(paces)


def test_a_rank_that_becomes_slow_is_named_within_twenty_steps_and_again_when_it_recovers() -> None:
    def true(step: int) -> np.ndarray:
        return np.array([1.0, 0.5 if 21 <= step < 51 else 1.0, 1.0])

    slow, free = _found(["A100"] * 3, true, steps=80)
    assert isinstance(slow, Slowed)
    assert isinstance(free, Slowed)
    assert (slow.rank, slow.is_over, free.rank, free.is_over) == (1, False, 1, True)
    assert 21 <= slow.step <= 40
    assert 15 <= slow.since <= 24
    assert slow.factor == pytest.approx(0.5, abs=0.05)
    assert 51 <= free.step <= 70
    assert slow.text == (
        f"rank 1 (host-1, A100) trains at {slow.factor:.2f} of the speed of its kind since step "
        f"{slow.since}"
    )


def test_a_slower_kind_is_not_slow() -> None:
    assert _found(["A100", "A100", "T4", "T4"], _paces(1, 1, 0.2, 0.2)) == []
    (slow,) = _found(["A100", "A100", "T4", "T4"], _paces(1, 1, 0.2, 0.1))
    assert isinstance(slow, Slowed)
    assert slow.rank == 3


def test_speeds_are_asked_for_only_where_they_deal() -> None:
    kinds = ["A100", "T4"]
    assert _found(kinds, _paces(1, 0.5)) == []
    asked = [e for e in _found(kinds, _paces(1, 0.5), deals=True) if isinstance(e, Paced)]
    assert asked
    assert asked[0].step <= 20
    assert asked[0].speeds == (256, pytest.approx(128, abs=8))


def test_a_group_of_ranks_goes_by_its_slowest_member() -> None:
    kinds = ["a", "b", "c", "d"]
    found = _found(kinds, _paces(1, 0.5, 1, 1), deals=True, data_ranks=[0, 0, 1, 1])
    (first, *_) = found
    assert isinstance(first, Paced)
    assert first.speeds == (pytest.approx(128, abs=8), 256)
    assert len(first.paces) == 4


def test_where_times_are_not_known_nothing_is_told() -> None:
    told: list[Event] = []
    pacing = Pacing([RankPlace("a", "a", "H100")] * 2, [0, 1], deals=True, tell=told.append)
    step = RankStep(step=4, rows=NO_ROWS, cuts=np.zeros(2, np.int64), imbalance=1.0)
    pacing(step, [])
    pacing(step, [Effort(0.0, 1.0), Effort(0.0, 1.0)])
    assert told == []


def test_a_rank_too_slow_for_a_row_is_told_with_the_batch_that_gives_it_one() -> None:
    (line,) = idle_ranks((256, 256, 16), 16)
    assert line == (
        "data rank 2, at 0.062 of the speed of the fastest, is too slow to get one of 16 samples a "
        "step; a batch_size of 33 would give it one"
    )
    assert list(idle_ranks((256, 256, 16), 33)) == []
    assert list(idle_ranks((), 1)) == []


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=40))
def test_the_median_of_all_others(values: list[float]) -> None:
    others = [values[:number] + values[number + 1 :] for number in range(len(values))]
    assert medians_of_others(np.array(values)).tolist() == [np.median(each) for each in others]
