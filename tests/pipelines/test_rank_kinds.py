"""The deal to ranks that have room for different numbers of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.deal import WorkModel, deal
from elastrata_pipelines.speeds import RankKind, different, kinds_of_groups, quantized

batches = st.lists(st.integers(1, 512), min_size=1, max_size=80).map(np.array)
ranks = st.lists(st.tuples(st.floats(0.02, 1.0), st.integers(512, 5000)), min_size=1, max_size=12)
works = st.builds(
    WorkModel,
    linear=st.integers(1, 10**7),
    quadratic=st.integers(0, 10**5),
    fixed=st.sampled_from([0, 10**6, 10**10]),
)
BIG, SMALL = RankKind("A100"), RankKind("T4", 512)


@given(batches, ranks, works, st.integers(1, 3), st.booleans())
def test_no_rank_gets_more_than_it_has_room_for_and_all_have_equally_many_micro_batches(
    lengths: np.ndarray,
    ranks: list[tuple[float, int]],
    work: WorkModel,
    multiple: int,
    equally_fast: bool,
) -> None:
    paces, budgets = zip(*ranks, strict=True)
    dealt = deal(
        lengths,
        num_ranks=len(ranks),
        work=work,
        tokens_per_micro_batch=max(budgets),
        multiple=multiple,
        speeds=() if equally_fast else quantized(paces),
        budgets=budgets,
    )
    rows = np.concatenate([hand.rows for hand in dealt.hands])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    (counts,) = {len(hand.cuts) - 1 for hand in dealt.hands}
    assert counts % multiple == 0
    for hand, budget in zip(dealt.hands, budgets, strict=True):
        tokens = np.concatenate([[0], lengths[hand.rows].cumsum()])[hand.cuts]
        assert (np.diff(tokens) <= budget).all()


@given(batches, st.integers(1, 9), works, st.integers(512, 5000))
def test_equal_budgets_deal_as_one(
    lengths: np.ndarray, num_ranks: int, work: WorkModel, budget: int
) -> None:
    one, each = (
        deal(lengths, num_ranks=num_ranks, work=work, tokens_per_micro_batch=budget, budgets=given)
        for given in ((), (budget,) * num_ranks)
    )
    assert one.imbalance == each.imbalance
    for mine, theirs in zip(one.hands, each.hands, strict=True):
        assert mine.rows.tolist() == theirs.rows.tolist()
        assert mine.cuts.tolist() == theirs.cuts.tolist()


@pytest.mark.parametrize(("fixed", "rows"), [(0, [10, 10]), (10**12, [15, 5])])
def test_who_has_room_takes_more_where_micro_batches_cost_more_than_equal_times_save(
    fixed: int, rows: list[int]
) -> None:
    dealt = deal(
        [10] * 20,
        num_ranks=2,
        work=WorkModel(linear=10**6, quadratic=0, fixed=fixed),
        tokens_per_micro_batch=150,
        budgets=(150, 50),
    )
    assert [len(hand.rows) for hand in dealt.hands] == rows
    assert {len(hand.cuts) - 1 for hand in dealt.hands} == ({2} if fixed == 0 else {1})


def test_a_sample_that_a_rank_has_no_room_for_is_refused() -> None:
    work = WorkModel(linear=1, quadratic=0)
    with pytest.raises(ValueError, match="a sample of 60 tokens exceeds the 50"):
        deal([60], num_ranks=2, work=work, tokens_per_micro_batch=100, budgets=(100, 50))
    with pytest.raises(ValueError, match="1 budgets for 2 ranks"):
        deal([10], num_ranks=2, work=work, tokens_per_micro_batch=100, budgets=(100,))


def test_ranks_that_compute_together_have_the_room_of_the_smallest() -> None:
    assert kinds_of_groups((BIG, BIG, SMALL, SMALL), copies=2) == (BIG, SMALL)
    (both,) = set(kinds_of_groups((BIG, BIG, SMALL, SMALL), repeats=2))
    assert (both.name, both.most_tokens) == ("A100 + T4", 512)
    assert different((SMALL, BIG, SMALL)) == (SMALL, BIG)
    assert [kind.budget(n) for kind in (BIG, SMALL) for n in (256, 1024)] == [256, 1024, 256, 512]
