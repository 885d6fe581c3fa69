"""Spans of blocks: where a model is cut into the stages of a pipeline. Numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def stage_spans(
    costs: Sequence[int], num_stages: int, speeds: Sequence[float] | None = None
) -> list[range]:
    """The blocks of each stage, in order; every stage gets at least one.

    The stage that takes longest, which sets the pace of a pipeline, is as fast as it can be; of all
    such divisions it is one with the least sum of squares of the times.

    Args:
        costs: of every block.
        num_stages: how many stages.
        speeds: of the ranks that have the stages in turns; default: all are equally fast.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} blocks for {num_stages} stages")
    sums = [0, *accumulate(costs)]

    def seconds(begin: int, end: int, stage: int) -> float:
        cost = sums[end] - sums[begin]
        return cost / speeds[stage % len(speeds)] if speeds else cost

    @cache
    def longest(blocks: int, stages: int) -> float:
        """The least possible time of the slowest of so many stages with the first blocks."""
        if stages == 1:
            return seconds(0, blocks, 0)
        return min(
            max(longest(cut, stages - 1), seconds(cut, blocks, stages - 1))
            for cut in range(stages - 1, blocks)
        )

    limit = longest(len(costs), num_stages)

    @cache
    def squares(blocks: int, stages: int) -> tuple[float, int]:
        """The least sum of squares within `limit`, and the first block of the last stage."""
        best = (float("inf"), 0)
        for cut in range(stages - 1, blocks) if stages > 1 else [0]:
            own = seconds(cut, blocks, stages - 1)
            if own <= limit:
                before = squares(cut, stages - 1)[0] if stages > 1 else 0.0
                best = min(best, (before + float(own) ** 2, cut))
        return best

    spans, end = [], len(costs)
    for stages in range(num_stages, 0, -1):
        begin = squares(end, stages)[1]
        spans.append(range(begin, end))
        end = begin
    return spans[::-1]
