"""Shares of ranks that are not equally fast: which rows of a batch each of them gets."""

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
    """Rows by rank."""

    ranks: Ints
    """The rank of each row, in the order of the rows."""
    seconds: float
    """Of the slowest rank, where a second is what the fastest takes for work of 1."""
    imbalance: float
    """The same over the time of all work at the speed of all ranks."""


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
    """Each row to the rank that is done with it first; with fewer micro-batches where that is
    quicker.

    The time that micro-batches leave for work falls the slower the more there are of them, so that
    the search ends where one less does not pay.

    Args:
        lengths: tokens of each row, longest first, shape [B].
        costs: work of each row, shape [B].
        speeds: of the ranks.
        fixed: work of a micro-batch beside its rows.
        budgets: tokens that a micro-batch of each rank holds, shape [ranks].
        multiple: micro-batches come in so many.
        count: micro-batches of every rank, from the rank of each row.
    """
    rates = np.asarray(speeds, dtype=np.float64) / FULL_SPEED
    free = _shares(soonest(costs, rates), costs, rates)
    tokens, total = int(lengths.sum()), float(costs.sum())
    largest = np.bincount(free.ranks, weights=lengths, minlength=len(rates))
    if not fixed or (largest <= budgets).all():
        return free
    number = count(free.ranks)
    best, best_seconds = free, free.seconds + number * fixed
    least = -(-tokens // int(budgets.sum()))
    while (number := number - multiple) >= least:
        room = number * budgets
        expected = seconds_within(total, rates, room * total / tokens) + number * fixed
        if expected >= best_seconds:
            break
        ranks = soonest_with_room(costs, rates, lengths, room)
        if ranks is None:
            break
        shares = _shares(ranks, costs, rates)
        seconds = shares.seconds + count(ranks) * fixed
        if seconds < best_seconds:
            best, best_seconds = shares, seconds
    return best


def soonest(costs: Ints, rates: Floats) -> Ints:
    """The rank of each row: rows in the given order, each to the rank that is done with it first.

    Ties go to the lowest rank; rows of equal work that follow each other may change places.

    Args:
        costs: work of each row, shape [B].
        rates: work of each rank in a second, shape [ranks].
    """
    busy, seconds_each = np.zeros(len(rates)), 1 / rates
    firsts = np.flatnonzero(np.diff(costs, prepend=-1))
    numbers = np.diff(firsts, append=len(costs))
    ranks = [np.zeros(0, dtype=np.int64)]
    for cost, number in zip(costs[firsts].tolist(), numbers.tolist(), strict=True):
        ranks += _equal_rows(cost * seconds_each, number, busy)
    return np.concatenate(ranks)


def _equal_rows(seconds: Floats, left: int, busy: Floats) -> Iterator[Ints]:
    """The ranks of rows of equal work, each the first to be done with it.

    Whoever would be done with one of them before anybody is with two gets one, all at once.

    Args:
        seconds: that each rank takes for a row, shape [ranks].
        left: rows.
        busy: seconds that each rank has work for; these rows are added.
    """
    while left:
        ends = busy + seconds
        if left == 1:
            chosen = np.array([ends.argmin()])
        else:
            chosen = _first(ends, float((ends + seconds).min()), left)
        busy[chosen] += seconds[chosen]
        left -= len(chosen)
        yield chosen


def _first(ends: Floats, bound: float, number: int) -> Ints:
    """The ranks with the earliest ends, so many at most and none at `bound` or later; at least one.
    Of equal ends the lowest ranks: an order that is the same on every processor."""
    if number < len(ends):
        last = np.partition(ends, number - 1)[number - 1]
        if last < bound:
            chosen = np.flatnonzero(ends <= last)
            return chosen if len(chosen) == number else _without_ties(ends, chosen, last, number)
    chosen = np.flatnonzero(ends < bound)[:number]
    return chosen if len(chosen) else np.array([ends.argmin()])


def _without_ties(ends: Floats, chosen: Ints, last: float, number: int) -> Ints:
    earlier, equal = chosen[ends[chosen] < last], chosen[ends[chosen] == last]
    return np.concatenate([earlier, equal[: number - len(earlier)]])


def soonest_with_room(costs: Ints, rates: Floats, lengths: Ints, room: Ints) -> Ints | None:
    """As `soonest` has it, but with no more than `room` tokens for each rank; None where a row
    finds no room.

    Args:
        costs: work of each row, shape [B].
        rates: work of each rank in a second, shape [ranks].
        lengths: tokens of each row, shape [B].
        room: tokens, shape [ranks].
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


def seconds_within(total: float, rates: Floats, most: Floats) -> float:
    """The least time in which ranks do `total` work that can be cut anywhere, none more than it
    has room for: those that are full first do that much, the others the rest in proportion.

    Args:
        total: work.
        rates: work of each rank in a second, shape [ranks].
        most: work that each rank has room for, shape [ranks].
    """
    order = np.argsort(most / rates, kind="stable")
    by_end, room = rates[order], most[order]
    left = by_end[::-1].cumsum()[::-1]
    full = np.concatenate([[0.0], room.cumsum()[:-1]])
    seconds = np.maximum(total - full, 0.0) / left
    fits = seconds * by_end <= room * (1 + 1e-12)
    return float(seconds[fits][0]) if fits.any() else float("inf")


def _shares(ranks: Ints, costs: Ints, rates: Floats) -> Shares:
    loads = np.bincount(ranks, weights=costs, minlength=len(rates))
    seconds, ideal = float((loads / rates).max()), float(loads.sum() / rates.sum())
    return Shares(ranks=ranks, seconds=seconds, imbalance=seconds / ideal if ideal else 1.0)
