"""Which blocks a stage of a pipeline gets: equal costs, as far as blocks can be had whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def stage_spans(costs: Sequence[int], num_stages: int) -> list[range]:
    """The blocks of each stage, in order; every stage gets at least one.

    The dearest stage, which sets the pace of a pipeline, is as cheap as it can be; of all such
    divisions it is one with the least sum of squares.

    Args:
        costs: of every block.
        num_stages: how many stages.

    Raises:
        ValueError: there are fewer blocks than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} blocks for {num_stages} stages")
    sums = [0, *accumulate(costs)]

    @cache
    def dearest(blocks: int, stages: int) -> int:
        """The least possible cost of the dearest of so many stages with the first blocks."""
        if stages == 1:
            return sums[blocks]
        return min(
            max(dearest(cut, stages - 1), sums[blocks] - sums[cut])
            for cut in range(stages - 1, blocks)
        )

    limit = dearest(len(costs), num_stages)

    @cache
    def squares(blocks: int, stages: int) -> tuple[float, int]:
        """The least sum of squares within `limit`, and the first block of the last stage."""
        found = (float("inf"), 0)
        for cut in range(stages - 1, blocks) if stages > 1 else [0]:
            cost = sums[blocks] - sums[cut]
            if cost <= limit:
                before = squares(cut, stages - 1)[0] if stages > 1 else 0.0
                found = min(found, (before + float(cost) ** 2, cut))
        return found

    spans, end = [], len(costs)
    for stages in range(num_stages, 0, -1):
        begin = squares(end, stages)[1]
        spans.append(range(begin, end))
        end = begin
    return spans[::-1]
