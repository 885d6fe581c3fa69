"""The deal: every row dealt once, equal work, micro-batches under the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.deal import WorkModel, deal

lengths_of_batches = st.lists(st.integers(1, 512), max_size=120).map(
    lambda values: np.array(values, dtype=np.int64)
)
works = st.builds(WorkModel, linear=st.integers(0, 10**7), quadratic=st.integers(0, 10**5))
ranks = st.integers(1, 40)
budgets = st.integers(512, 5000)


@given(lengths_of_batches, ranks, works, budgets)
def test_every_row_is_dealt_once_in_micro_batches_under_the_budget(
    lengths: np.ndarray, num_ranks: int, work: WorkModel, budget: int
) -> None:
    dealt = deal(lengths, num_ranks=num_ranks, work=work, tokens_per_micro_batch=budget)
    assert len(dealt.hands) == num_ranks
    rows = np.concatenate([hand.rows for hand in dealt.hands])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    assert len({len(hand.cuts) for hand in dealt.hands}) == 1
    for hand in dealt.hands:
        assert hand.cuts[0] == 0
        assert hand.cuts[-1] == len(hand.rows)
        assert np.all(np.diff(hand.cuts) >= 0)
        assert np.all(np.diff(lengths[hand.rows]) <= 0)
        for begin, end in zip(hand.cuts[:-1], hand.cuts[1:], strict=True):
            assert lengths[hand.rows[begin:end]].sum() <= budget


@given(lengths_of_batches, ranks, works)
def test_no_rank_has_more_than_the_mean_and_one_row(
    lengths: np.ndarray, num_ranks: int, work: WorkModel
) -> None:
    dealt = deal(lengths, num_ranks=num_ranks, work=work, tokens_per_micro_batch=512)
    costs = work(lengths)
    loads = [int(costs[hand.rows].sum()) for hand in dealt.hands]
    largest_row = int(costs.max()) if len(costs) else 0
    assert max(loads) * num_ranks <= sum(loads) + (num_ranks - 1) * largest_row
    if sum(loads):
        assert dealt.imbalance == pytest.approx(max(loads) * num_ranks / sum(loads))


@given(lengths_of_batches, ranks, works, budgets)
def test_the_hands_depend_on_lengths_alone(
    lengths: np.ndarray, num_ranks: int, work: WorkModel, budget: int
) -> None:
    """Another order of the batch's rows gives every rank the same lengths."""
    shuffled = np.random.default_rng(len(lengths)).permutation(lengths)
    first, second = (
        deal(values, num_ranks=num_ranks, work=work, tokens_per_micro_batch=budget)
        for values in (lengths, shuffled)
    )
    for one, other in zip(first.hands, second.hands, strict=True):
        assert np.array_equal(lengths[one.rows], shuffled[other.rows])
        assert np.array_equal(one.cuts, other.cuts)


def test_a_row_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="300 tokens exceeds the 200"):
        deal(
            [100, 300], num_ranks=2, work=WorkModel(linear=1, quadratic=0),
            tokens_per_micro_batch=200,
        )  # fmt: skip


def test_micro_batches_come_in_multiples() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1]
    for multiple, expected in ((1, 3), (2, 4), (4, 4), (6, 6)):
        dealt = deal(
            lengths,
            num_ranks=2,
            work=WorkModel(linear=1, quadratic=0),
            tokens_per_micro_batch=10,
            multiple=multiple,
        )
        assert {len(hand.cuts) - 1 for hand in dealt.hands} == {expected}
        assert sorted(row for hand in dealt.hands for row in hand.rows) == list(range(9))
