"""The deal: a global batch's rows to ranks, so that all carry equal work, and on to micro-batches.

Numbers in, numbers out. What is in a batch is never changed for the sake of balance.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.speeds import FULL_SPEED, Speeds
from elastrata_pipelines.uneven_shares import shares_by_speed

Ints = npt.NDArray[np.int64]
FIXED_TOKENS = 50
"""A micro-batch costs about as much beside its rows as so many tokens in it: 37 and 67 with two
models on a CPU. Gathers over a network cost more."""


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """Work of one sample of s tokens: linear * s + quadratic * s^2, in whole FLOPs of one layer;
    and where some layers attend within a window only, windowed * (the pairs of tokens in it).

    Integers, so that sums are exact and equal on every machine.
    """

    linear: int
    quadratic: int
    windowed: int = 0
    """Times the pairs of tokens at most `window` apart."""
    window: int = 0
    fixed: int = 0
    """Of a micro-batch beside its samples, which takes all ranks equally long: what the fastest one
    would do meanwhile."""

    def __call__(self, lengths: npt.ArrayLike) -> Ints:
        """The work of samples of these lengths, element by element."""
        s = np.asarray(lengths, dtype=np.int64)
        whole: Ints = s * (self.linear + self.quadratic * s)
        return whole + self.windowed * pairs_within(s, self.window) if self.windowed else whole


def pairs_within(lengths: Ints, window: int) -> Ints:
    """Ordered pairs of tokens at most `window` apart in samples of these lengths s: for every token
    itself and m = min(window, s - 1) on each side, less the m (m + 1) that are beyond both ends."""
    reach: Ints = np.minimum(window, lengths - 1)
    return lengths * (2 * reach + 1) - reach * (reach + 1)


@dataclass(frozen=True)
class Hand:
    """One rank's part of a deal: its rows of the batch, longest first, cut into micro-batches."""

    rows: Ints
    """Indices into the global batch."""
    cuts: Ints
    """Shape [num_micro_batches + 1]: micro-batch m is rows[cuts[m]:cuts[m + 1]], maybe empty."""


@dataclass(frozen=True)
class Deal:
    """A dealt global batch. Every rank has the same number of micro-batches."""

    hands: tuple[Hand, ...]
    imbalance: float
    """Time of the slowest rank over that of all work at the speed of all ranks; where they are
    equally fast, the largest work of a rank over the mean work."""
    rounds: int = 1
    """The gradient is reduced so many times, after equally many micro-batches each."""


def deal(
    lengths: npt.ArrayLike,
    *,
    num_ranks: int,
    work: WorkModel,
    tokens_per_micro_batch: int,
    multiple: int = 1,
    speeds: Speeds = (),
    budgets: Sequence[int] = (),
) -> Deal:
    """Deals a global batch: longest row first, each to the rank that would be done with it first.

    For equal ranks this is Graham's LPT rule (SIAM J. Appl. Math. 17, 1969): the largest work is at
    most the mean plus the work of one row, and at most 4/3 - 1/(3 num_ranks) of the best possible.
    For ranks of several speeds it is LPT on uniform machines (Gonzalez, Ibarra, Sahni, SIAM J.
    Comput. 6, 1977): the longest time is at most the ideal one plus that of one row at the mean
    speed, and at most 1 + 1/sqrt(3) of the best possible (Kovacs, SIAM J. Discrete Math. 24, 2010).

    All ranks have as many micro-batches as the one that needs most. Where one less of them saves
    more than equal times do, ranks get no more rows than fit.

    Args:
        lengths: tokens of each row of the batch, shape [B].
        num_ranks: number of data-parallel ranks.
        work: the cost of a row.
        tokens_per_micro_batch: no micro-batch holds more tokens.
        multiple: every rank gets a multiple of so many micro-batches.
        speeds: of the ranks; none: they are equally fast.
        budgets: tokens of a micro-batch of each rank, where some have room for fewer than
            `tokens_per_micro_batch`; none: all have that.

    Raises:
        ValueError: a row alone exceeds a token budget, or there is not one speed or one budget for
            every rank.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    each = budgets or (tokens_per_micro_batch,) * num_ranks
    if lengths.size and int(lengths.max()) > min(each):
        raise ValueError(
            f"a sample of {int(lengths.max())} tokens exceeds the {min(each)} tokens of a "
            "micro-batch"
        )
    for name, given in (("speeds", speeds), ("budgets", each)):
        if len(given) not in (0, num_ranks):
            raise ValueError(f"{len(given)} {name} for {num_ranks} ranks")
    by_length = np.argsort(-lengths, kind="stable")
    if len(set(speeds)) > 1 or len(set(each)) > 1:
        known = speeds or (FULL_SPEED,) * num_ranks
        rows, imbalance = _share_by_speed(by_length, lengths, work, known, each, multiple)
    else:
        rows, imbalance = _share(by_length, lengths, work, num_ranks)
    return Deal(hands=cut_hands(rows, lengths, each, multiple), imbalance=imbalance)


def cut_hands(
    rows: Sequence[Ints], lengths: Ints, budgets: Sequence[int], multiple: int = 1
) -> tuple[Hand, ...]:
    """Cuts each rank's rows, in their order, into equally many micro-batches, as few as will do.

    Args:
        rows: of each rank, indices into the batch.
        lengths: tokens of each row of the batch, shape [B], none more than fit a micro-batch.
        budgets: of each rank: none of its micro-batches holds more tokens.
        multiple: of so many micro-batches.
    """
    count = num_micro_batches(rows, lengths, budgets, multiple)
    return tuple(
        Hand(rows=own, cuts=cut(lengths[own], count, budget))
        for own, budget in zip(rows, budgets, strict=True)
    )


def num_micro_batches(
    rows: Sequence[Ints], lengths: Ints, budgets: Sequence[int], multiple: int = 1
) -> int:
    """Into how many micro-batches `cut_hands` cuts the rows of every rank."""
    each = zip(rows, budgets, strict=True)
    count = max(greedy_count(lengths[own], budget) for own, budget in each)
    return count + -count % multiple


def _share(rows: Ints, lengths: Ints, work: WorkModel, num_ranks: int) -> tuple[list[Ints], float]:
    """Each rank's rows, in the given order; and the largest work of a rank over the mean."""
    if num_ranks == 1:
        return [rows], 1.0
    costs = work(lengths[rows])
    ranks = least_loaded(costs, num_ranks)
    parts = _by_rank(rows, ranks, num_ranks)
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    mean = loads.mean()
    return parts, float(loads.max() / mean) if mean else 1.0


def _share_by_speed(
    rows: Ints,
    lengths: Ints,
    work: WorkModel,
    speeds: Speeds,
    budgets: Sequence[int],
    multiple: int,
) -> tuple[list[Ints], float]:
    """Each rank's rows, in the given order; and the time of the slowest rank over the ideal."""

    def count(ranks: Ints) -> int:
        return num_micro_batches(_by_rank(rows, ranks, len(speeds)), lengths, budgets, multiple)

    ordered = lengths[rows]
    shares = shares_by_speed(
        ordered,
        work(ordered),
        speeds,
        fixed=work.fixed,
        budgets=np.array(budgets),
        multiple=multiple,
        count=count,
    )
    return _by_rank(rows, shares.ranks, len(speeds)), shares.imbalance


def _by_rank(rows: Ints, ranks: Ints, num_ranks: int) -> list[Ints]:
    """Rows by the rank that each has, in their order."""
    grouped = rows[np.argsort(ranks, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1])


def least_loaded(costs: Ints, num_ranks: int) -> Ints:
    """The rank of each row: rows in the given order, each to the rank with the least cost so far.

    Ties go to the lowest rank.
    """
    heap = list(range(num_ranks))  # load * num_ranks + rank: one integer orders by load, then rank
    ranks = []
    for cost in costs.tolist():
        rank = heap[0] % num_ranks
        ranks.append(rank)
        heapq.heapreplace(heap, heap[0] + cost * num_ranks)
    return np.array(ranks, dtype=np.int64)


def greedy_count(lengths: Ints, budget: int) -> int:
    """Micro-batches needed, at least 1, when rows are taken in order while they fit `budget`."""
    return len(_greedy_starts(lengths, budget))


def cut(lengths: Ints, num_micro_batches: int, budget: int) -> Ints:
    """Cuts rows, in order, into parts of about equal tokens, none of more than `budget`.

    Returns the cuts, shape [num_micro_batches + 1]. Where equal parts would burst the budget, rows
    are taken greedily instead, and the last parts may be empty. `num_micro_batches` is at least
    `greedy_count` of the same rows.
    """
    if num_micro_batches == 1:
        return np.array([0, len(lengths)], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    targets = ends[-1] * np.arange(num_micro_batches + 1) / num_micro_batches
    cuts: Ints = np.searchsorted(ends, targets, side="left").astype(np.int64)
    cuts[0], cuts[-1] = 0, len(lengths)
    if np.all(np.diff(ends[cuts]) <= budget):
        return cuts
    starts = _greedy_starts(lengths, budget)
    missing = num_micro_batches + 1 - len(starts)
    return np.array(starts + [len(lengths)] * missing, dtype=np.int64)


def _greedy_starts(lengths: Ints, budget: int) -> list[int]:
    """The first row of each part when rows are taken in order while they fit `budget`."""
    starts, filled = [0], 0
    for row, length in enumerate(lengths.tolist()):
        if filled + length > budget:
            starts.append(row)
            filled = 0
        filled += length
    return starts
