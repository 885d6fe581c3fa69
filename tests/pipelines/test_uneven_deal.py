"""The deal to ranks of several speeds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.balance import draw_batches
from elastrata_pipelines.deal import Deal, WorkModel, deal
from elastrata_pipelines.speeds import (
    FULL_SPEED,
    Speeds,
    least_samples,
    paces_of_data_ranks,
    quantize_speeds,
)
from elastrata_pipelines.uneven_shares import assign_soonest, least_seconds_within_room
from elastrata_pipelines.virtual_ranks import assign_virtual_ranks, deal_to_virtual
from support.wikipedia import histogram

WORK = WorkModel(linear=24 * 1024**2, quadratic=4 * 1024)
lengths_of_batches = st.lists(st.integers(1, 512), min_size=1, max_size=80).map(np.array)
paces = st.lists(st.floats(0.02, 1.0), min_size=2, max_size=20)
works = st.builds(
    WorkModel,
    linear=st.integers(1, 10**7),
    quadratic=st.integers(0, 10**5),
    fixed=st.sampled_from([0, 10**6, 10**10]),
)


def _rates(speeds: Speeds) -> np.ndarray:
    return np.array(speeds) / FULL_SPEED


def _loads(dealt: Deal, lengths: np.ndarray, work: WorkModel) -> np.ndarray:
    return np.array([float(work(lengths[hand.rows]).sum()) for hand in dealt.hands])


@given(lengths_of_batches, paces, works, st.integers(512, 5000), st.integers(1, 3))
def test_every_row_is_dealt_once_in_micro_batches_under_the_budget(
    lengths: np.ndarray, paces: list[float], work: WorkModel, budget: int, multiple: int
) -> None:
    dealt = deal(
        lengths,
        num_ranks=len(paces),
        work=work,
        tokens_per_micro_batch=budget,
        multiple=multiple,
        speeds=quantize_speeds(paces),
    )
    rows = np.concatenate([hand.rows for hand in dealt.hands])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    (counts,) = {len(hand.cuts) - 1 for hand in dealt.hands}
    assert counts % multiple == 0
    for hand in dealt.hands:
        assert hand.cuts[0] == 0
        assert hand.cuts[-1] == len(hand.rows)
        for begin, end in zip(hand.cuts[:-1], hand.cuts[1:], strict=True):
            assert lengths[hand.rows[begin:end]].sum() <= budget


@given(lengths_of_batches, paces)
def test_no_rank_takes_longer_than_the_ideal_and_one_row_at_the_mean_speed(
    lengths: np.ndarray, paces: list[float]
) -> None:
    speeds = quantize_speeds(paces)
    dealt = deal(
        lengths, num_ranks=len(paces), work=WORK, tokens_per_micro_batch=512, speeds=speeds
    )
    rates = _rates(speeds)
    loads = _loads(dealt, lengths, WORK)
    seconds, ideal = (loads / rates).max(), loads.sum() / rates.sum()
    longest_row = WORK(lengths).max() / rates.mean()
    assert seconds <= (ideal + longest_row) * (1 + 1e-9)
    assert dealt.imbalance == pytest.approx(seconds / ideal)


@given(lengths_of_batches, paces, st.booleans())
def test_each_row_goes_to_the_rank_that_is_done_with_it_first(
    lengths: np.ndarray, paces: list[float], ties: bool
) -> None:
    """As one row after the other is dealt."""
    rates = np.ones(len(paces)) if ties else np.array(paces)
    costs = np.sort(lengths)[::-1] // 9
    busy = np.zeros(len(rates))
    for cost in costs.tolist():
        first = (busy + cost * (1 / rates)).argmin()
        busy[first] += cost * (1 / rates[first])
    ranks = assign_soonest(costs, rates)
    assert len(ranks) == len(costs)
    found = np.bincount(ranks, weights=costs, minlength=len(rates)) / rates
    assert found == pytest.approx(busy)


@given(lengths_of_batches, st.integers(1, 20), works)
def test_equal_speeds_deal_as_none(lengths: np.ndarray, num_ranks: int, work: WorkModel) -> None:
    plain, equal = (
        deal(lengths, num_ranks=num_ranks, work=work, tokens_per_micro_batch=512, speeds=speeds)
        for speeds in ((), (FULL_SPEED,) * num_ranks)
    )
    assert plain.imbalance == equal.imbalance
    for one, other in zip(plain.hands, equal.hands, strict=True):
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.cuts, other.cuts)


@pytest.mark.parametrize("paces", [(1, 0.8, 0.5, 0.25), (1, 0.93, 0.41, 0.3)])
def test_1024_ranks_of_four_kinds_balance_to_a_hundredth(paces: tuple[float, ...]) -> None:
    speeds = quantize_speeds([paces[rank * 4 // 1024] for rank in range(1024)])
    true = np.array([paces[rank * 4 // 1024] for rank in range(1024)])
    for lengths in draw_batches(histogram(), batch_size=16 * 1024, steps=3):
        dealt = deal(
            lengths, num_ranks=1024, work=WORK, tokens_per_micro_batch=16384, speeds=speeds
        )
        loads = _loads(dealt, lengths, WORK)
        assert (loads / true).max() * true.sum() / loads.sum() <= 1.01


@pytest.mark.parametrize(("fixed", "micro_batches"), [(0, 2), (10**12, 1)])
def test_fewer_micro_batches_where_each_costs_more_than_equal_times_save(
    fixed: int, micro_batches: int
) -> None:
    work = WorkModel(linear=10**6, quadratic=0, fixed=fixed)
    dealt = deal(
        [10] * 20, num_ranks=2, work=work, tokens_per_micro_batch=100, speeds=(FULL_SPEED, 128)
    )
    assert {len(hand.cuts) - 1 for hand in dealt.hands} == {micro_batches}
    assert [len(hand.rows) for hand in dealt.hands] == ([14, 6] if fixed == 0 else [10, 10])


@given(paces, st.floats(1.0, 1e6), st.floats(0.01, 1.0))
def test_work_that_can_be_cut_anywhere_is_all_done(
    paces: list[float], total: float, share: float
) -> None:
    """Ranks that have room for the work by `share` more than they must."""
    rates, rooms = np.array(paces), np.array(paces[::-1]) ** 2
    most = total * rooms / rooms.sum() * (1 + share)
    seconds = least_seconds_within_room(total, rates, most)
    assert np.minimum(rates * seconds, most).sum() == pytest.approx(total)


@given(paces, st.data())
def test_the_fewest_samples_that_give_a_rank_one(paces: list[float], data: st.DataObject) -> None:
    speeds = quantize_speeds(paces)
    rank = data.draw(st.integers(0, len(speeds) - 1))
    fewest = least_samples(speeds, rank)

    def dealt(samples: int) -> int:
        hands = deal(
            [10] * samples,
            num_ranks=len(speeds),
            work=WORK,
            tokens_per_micro_batch=10 * samples,
            speeds=speeds,
        ).hands
        return len(hands[rank].rows)

    assert dealt(fewest) >= 1
    ties = sum(speed % speeds[rank] == 0 for speed in speeds)
    assert fewest <= ties or dealt(fewest - ties) == 0


def test_a_group_is_as_fast_as_its_slowest_member() -> None:
    assert paces_of_data_ranks([4, 3, 2, 1]) == [4, 3, 2, 1]
    assert paces_of_data_ranks([4, 3, 2, 1], copies=2) == [3, 1]
    assert paces_of_data_ranks([4, 3, 2, 1], repeats=2) == [2, 1]
    assert paces_of_data_ranks([8, 7, 6, 5, 4, 3, 2, 1], copies=2, repeats=2) == [3, 1]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_pace_that_cannot_be_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="positive, finite"):
        quantize_speeds([1.0, bad])


@given(st.integers(1, 24), st.lists(st.integers(1, FULL_SPEED), min_size=1, max_size=9))
def test_virtual_ranks_are_played_once_and_in_no_more_time_than_by_all_ranks(
    virtual_ranks: int, speeds: list[int]
) -> None:
    rounds = assign_virtual_ranks(virtual_ranks, tuple(speeds))
    assert sum(map(len, rounds)) == virtual_ranks
    assert all(list(ranks) == sorted(set(ranks)) for ranks in rounds)
    seconds = sum(1 / min(speeds[rank] for rank in ranks) for ranks in rounds)
    by_all = -(-virtual_ranks // len(speeds)) / min(speeds)
    assert seconds <= by_all * (1 + 1e-6)


def test_a_slow_rank_sits_out_rounds_that_it_would_hold_up() -> None:
    assert assign_virtual_ranks(6, (256, 256, 256, 100)) == ((0, 1, 2), (0, 1, 2))
    assert assign_virtual_ranks(7, (256, 256, 256, 200)) == ((0, 1, 2, 3), (0, 1, 2))
    assert assign_virtual_ranks(4, (256, 128)) == ((0, 1), (0, 1))


@given(lengths_of_batches, st.integers(1, 9), paces)
def test_virtual_ranks_hold_the_rows_that_they_would_without_speeds(
    lengths: np.ndarray, virtual_ranks: int, paces: list[float]
) -> None:
    whole = deal(lengths, num_ranks=virtual_ranks, work=WORK, tokens_per_micro_batch=512)
    dealt = deal_to_virtual(
        lengths,
        virtual_ranks=virtual_ranks,
        num_ranks=len(paces),
        work=WORK,
        tokens_per_micro_batch=512,
        speeds=quantize_speeds(paces),
    )
    per_round = len(whole.hands[0].cuts) - 1
    played = [
        hand.rows[hand.cuts[n * per_round] : hand.cuts[(n + 1) * per_round]].tolist()
        for n in range(dealt.rounds)
        for hand in dealt.hands
    ]
    assert [rows for rows in played if rows] == [
        h.rows.tolist() for h in whole.hands if len(h.rows)
    ]
