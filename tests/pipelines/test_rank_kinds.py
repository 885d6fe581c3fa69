"""The deal to ranks that have room for different numbers of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.deal import WorkModel, deal
from elastrata_pipelines.speeds import RankKind, distinct_kinds, kinds_of_groups, quantize_speeds

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
        speeds=() if equally_fast else quantize_speeds(paces),
        budgets=budgets,
    )
    rows = np.concatenate([hand.rows for hand in dealt.hands])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    (counts,) = {len(hand.cuts) - 1 for hand in dealt.hands}
    assert counts % multiple == 0
    for hand, budget in zip(dealt.hands, budgets, strict=True):
        tokens = np.concatenate([[0], lengths[hand.rows].cumsum()])[hand.cuts]
        assert (np.diff(tokens) <= budget).all()


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
    assert distinct_kinds((SMALL, BIG, SMALL)) == (SMALL, BIG)
    assert [kind.budget(n) for kind in (BIG, SMALL) for n in (256, 1024)] == [256, 1024, 256, 512]
