"""Blocks to stages, and what waits in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata.pipeline.microbatches import bubble, one_stage_order
from elastrata.pipeline.stages import stage_spans


def _largest(costs: list[int], cuts: tuple[int, ...]) -> int:
    ends = [0, *cuts, len(costs)]
    return max(sum(costs[a:b]) for a, b in pairwise(ends))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.data())
def test_the_dearest_stage_is_as_cheap_as_can_be(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    spans = stage_spans(costs, num_stages)
    assert [block for span in spans for block in span] == list(range(len(costs)))
    assert len(spans) == num_stages
    assert all(spans)
    best = min(_largest(costs, cuts) for cuts in combinations(range(1, len(costs)), num_stages - 1))
    assert max(sum(costs[block] for block in span) for span in spans) == best


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_the_slowest_stage_is_as_fast_as_can_be(
    costs: list[int], speeds: list[float], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    spans = stage_spans(costs, num_stages, speeds)
    assert [block for span in spans for block in span] == list(range(len(costs)))
    found = _slowest(costs, [span.start for span in spans[1:]], speeds)
    ways = combinations(range(1, len(costs)), num_stages - 1)
    assert found == pytest.approx(min(_slowest(costs, cuts, speeds) for cuts in ways))


def _slowest(costs: list[int], cuts: Sequence[int], speeds: list[float]) -> float:
    ends = [0, *cuts, len(costs)]
    return max(
        sum(costs[a:b]) / speeds[stage % len(speeds)] for stage, (a, b) in enumerate(pairwise(ends))
    )


def test_equal_blocks_are_shared_out_evenly_and_a_head_counts() -> None:
    assert [len(span) for span in stage_spans([3] * 10, 4)] in ([3, 3, 2, 2], [2, 2, 3, 3])
    assert [len(span) for span in stage_spans([3] * 7 + [8], 2)] == [5, 3]
    assert [len(span) for span in stage_spans([3] * 9, 2, (1.0, 0.5))] == [6, 3]
    with pytest.raises(ValueError, match="2 blocks for 3 stages"):
        stage_spans([1, 1], 3)


@pytest.mark.parametrize("interleaves", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("count", [4, 9])
def test_the_bubble_of_equal_stages_is_the_known_one(
    interleaves: bool, ranks: int, count: int
) -> None:
    order = one_stage_order(ranks, count, interleaves=interleaves)
    for recomputed in (0.0, 1.0):
        found = bubble(order, [7.0] * ranks, recomputed=recomputed)
        assert found == pytest.approx((ranks - 1) / (count + ranks - 1))


def test_weights_gradients_fill_waits_and_a_dear_stage_makes_some() -> None:
    whole = one_stage_order(2, 2, interleaves=True)
    parted = {0: whole[0], 1: [(1, "F", 0), (1, "I", 0), (1, "F", 1), (1, "I", 1)]}
    parted[1] += [(1, "W", 0), (1, "W", 1)]
    assert bubble(parted, [1.0, 1.0], recomputed=0.0) < bubble(whole, [1.0] * 2, recomputed=0.0)
    assert bubble(whole, [1.0, 2.0], recomputed=0.0) > 1 / 3
    with pytest.raises(ValueError, match="every rank waits"):
        bubble({0: [(0, "B", 0)]}, [1.0], recomputed=0.0)
