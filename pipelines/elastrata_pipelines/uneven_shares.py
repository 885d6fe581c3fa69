"""Uneven shares: assigns the rows of a batch to ranks of different speeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.speeds import FULL_SPEED

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """An assignment of rows to ranks."""

    ranks: Ints
    """Rank of each row, in the order of the rows."""
    # A second is the time in which the fastest rank does work of 1.
    seconds: float
    """Time of the slowest rank."""
    imbalance: float
    """Time of the slowest rank over the time of all work at the combined speed of all ranks."""


def shares_by_speed(
    lengths: Ints,
    costs: Ints,
    speeds: Sequence[int],
    *,
    fixed: int,
    budgets: Ints,
    multiple: int,
    count: Callable[[Ints], int],
) -> Shares:
    """Assign each row to the rank that finishes it first; use fewer micro-batches if that is
    faster.

    Args:
        lengths: tokens of each row, longest first, shape [B].
        costs: work of each row, shape [B].
        speeds: speeds of the ranks.
        fixed: work of a micro-batch, independent of its rows.
        budgets: tokens that a micro-batch of each rank holds, shape [ranks].
        multiple: the number of micro-batches is a multiple of this.
        count: function from the rank of each row to the number of micro-batches of every rank.
    """
    rates = np.asarray(speeds, dtype=np.float64) / FULL_SPEED
    unlimited = _shares(assign_soonest(costs, rates), costs, rates)
    tokens, total = int(lengths.sum()), float(costs.sum())
    largest = np.bincount(unlimited.ranks, weights=lengths, minlength=len(rates))
    if not fixed or (largest <= budgets).all():
        return unlimited
    number = count(unlimited.ranks)
    best, best_seconds = unlimited, unlimited.seconds + number * fixed
    least = -(-tokens // int(budgets.sum()))
    # Each micro-batch less costs more balance than the one before, so the search ends with the
    # first that cannot pay.
    while (number := number - multiple) >= least:
        room = number * budgets
        # A lower bound, which spares most assignments.
        expected = least_seconds_within_room(total, rates, room * total / tokens) + number * fixed
        if expected >= best_seconds:
            break
        ranks = assign_soonest_with_room(costs, rates, lengths, room)
        if ranks is None:
            break
        shares = _shares(ranks, costs, rates)
        seconds = shares.seconds + count(ranks) * fixed
        if seconds < best_seconds:
            best, best_seconds = shares, seconds
    return best


def assign_soonest(costs: Ints, rates: Floats) -> Ints:
    """Return the rank of each row: rows in the given order, each to the rank that finishes it
    first.

    Ties go to the lowest rank; consecutive rows of equal work may swap ranks.

    Args:
        costs: work of each row, shape [B].
        rates: work of each rank per second, shape [ranks].
    """
    busy, seconds_each = np.zeros(len(rates)), 1 / rates
    # Rows of equal work are assigned together, which takes far fewer steps than row by row.
    firsts = np.flatnonzero(np.diff(costs, prepend=-1))
    numbers = np.diff(firsts, append=len(costs))
    ranks = [np.zeros(0, dtype=np.int64)]
    for cost, number in zip(costs[firsts].tolist(), numbers.tolist(), strict=True):
        ranks += _equal_rows(cost * seconds_each, number, busy)
    return np.concatenate(ranks)


def _equal_rows(seconds: Floats, left: int, busy: Floats) -> Iterator[Ints]:
    """Yield the ranks of rows of equal work, each the first to finish its row.

    Args:
        seconds: time of each rank for one row, shape [ranks].
        left: number of rows.
        busy: seconds of work that each rank has; updated in place.
    """
    while left:
        ends = busy + seconds
        if left == 1:
            chosen = np.array([ends.argmin()])
        else:
            # All ranks that finish one row before any rank finishes two get a row in the same
            # round.
            chosen = _first_ranks(ends, float((ends + seconds).min()), left)
        busy[chosen] += seconds[chosen]
        left -= len(chosen)
        yield chosen


def _first_ranks(ends: Floats, bound: float, number: int) -> Ints:
    """Return the ranks with the earliest ends before `bound`, at most `number` and at least one.

    Of equal ends the lowest ranks are chosen.
    """
    if number < len(ends):
        # np.argpartition would choose among equal ends differently on different processors.
        last = np.partition(ends, number - 1)[number - 1]
        if last < bound:
            chosen = np.flatnonzero(ends <= last)
            return chosen if len(chosen) == number else _resolve_ties(ends, chosen, last, number)
    chosen = np.flatnonzero(ends < bound)[:number]
    return chosen if len(chosen) else np.array([ends.argmin()])


def _resolve_ties(ends: Floats, chosen: Ints, last: float, number: int) -> Ints:
    earlier, equal = chosen[ends[chosen] < last], chosen[ends[chosen] == last]
    return np.concatenate([earlier, equal[: number - len(earlier)]])


def assign_soonest_with_room(costs: Ints, rates: Floats, lengths: Ints, room: Ints) -> Ints | None:
    """Return the same as `soonest`, with at most `room` tokens per rank; None if a row does not
    fit.

    Args:
        costs: work of each row, shape [B].
        rates: work of each rank per second, shape [ranks].
        lengths: tokens of each row, shape [B].
        room: maximum number of tokens of each rank, shape [ranks].
    """
    loads, tokens, ranks = np.zeros(len(rates)), np.zeros(len(rates), dtype=np.int64), []
    for cost, length in zip(costs.tolist(), lengths.tolist(), strict=True):
        ends = np.where(tokens + length <= room, (loads + cost) / rates, np.inf)
        rank = int(ends.argmin())
        if ends[rank] == np.inf:
            return None
        ranks.append(rank)
        loads[rank] += cost
        tokens[rank] += length
    return np.array(ranks, dtype=np.int64)


def least_seconds_within_room(total: float, rates: Floats, most: Floats) -> float:
    """Return the least time in which ranks do `total` divisible work within their room.

    Args:
        total: amount of work.
        rates: work of each rank per second, shape [ranks].
        most: maximum work of each rank, shape [ranks].
    """
    # Ranks that are full first do their maximum, and the others divide the rest in proportion to
    # their rates.
    order = np.argsort(most / rates, kind="stable")
    by_end, room = rates[order], most[order]
    left = by_end[::-1].cumsum()[::-1]
    full = np.concatenate([[0.0], room.cumsum()[:-1]])
    seconds = np.maximum(total - full, 0.0) / left
    # The tolerance absorbs rounding.
    fits = seconds * by_end <= room * (1 + 1e-12)
    return float(seconds[fits][0]) if fits.any() else float("inf")


def _shares(ranks: Ints, costs: Ints, rates: Floats) -> Shares:
    loads = np.bincount(ranks, weights=costs, minlength=len(rates))
    seconds, ideal = float((loads / rates).max()), float(loads.sum() / rates.sum())
    return Shares(ranks=ranks, seconds=seconds, imbalance=seconds / ideal if ideal else 1.0)
