"""The deal: assigns the rows of a global batch to ranks of equal work, and then to micro-batches.

This module holds pure functions of numbers. Balancing never changes the content of a batch.
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
# Measured on a CPU: 37 and 67 with two models. Gathers over a network cost more.
FIXED_TOKENS = 50
"""Fixed cost of a micro-batch, independent of its rows, in tokens."""


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """Work of one sample of s tokens, in whole FLOPs of one layer: linear * s + quadratic * s^2.

    If some layers attend within a window only, windowed * (number of token pairs in the window) is
    added.
    """

    # Integers, so that sums are exact and equal on every machine.
    linear: int
    quadratic: int
    windowed: int = 0
    """Work per pair of tokens that are at most `window` apart."""
    window: int = 0
    fixed: int = 0
    """Fixed work of a micro-batch, independent of its samples. It takes all ranks the same time,
    and is given as the work that the fastest rank would do in that time."""

    def __call__(self, lengths: npt.ArrayLike) -> Ints:
        """Return the work of samples of these lengths, element by element."""
        s = np.asarray(lengths, dtype=np.int64)
        whole: Ints = s * (self.linear + self.quadratic * s)
        return (
            whole + self.windowed * count_pairs_within(s, self.window) if self.windowed else whole
        )


def count_pairs_within(lengths: Ints, window: int) -> Ints:
    """Return the number of ordered token pairs at most `window` apart in samples of these lengths.

    With m = min(window, s - 1), every token of a sample of s tokens pairs with itself and m tokens
    on each side, less the m (m + 1) that are beyond both ends.
    """
    reach: Ints = np.minimum(window, lengths - 1)
    return lengths * (2 * reach + 1) - reach * (reach + 1)


@dataclass(frozen=True)
class Hand:
    """One rank's part of a deal: its rows of the batch, longest first, divided into
    micro-batches."""

    rows: Ints
    """Indices into the global batch."""
    cuts: Ints
    """Shape [num_micro_batches + 1]: micro-batch m is rows[cuts[m]:cuts[m + 1]], and may be
    empty."""


@dataclass(frozen=True)
class Deal:
    """A dealt global batch. Every rank has the same number of micro-batches."""

    hands: tuple[Hand, ...]
    imbalance: float
    """Time of the slowest rank over the time of all work at the combined speed of all ranks. If
    ranks are equally fast, this is the largest work of a rank over the mean."""
    rounds: int = 1
    """Number of gradient reductions, each after the same number of micro-batches."""


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
    """Deal a global batch: assign rows, longest first, to the rank that would finish each one
    first.

    For equal ranks this is Graham's LPT rule (SIAM J. Appl. Math. 17, 1969): the largest work is at
    most the mean plus the work of one row, and at most 4/3 - 1/(3 num_ranks) of the best possible.
    For ranks of several speeds it is LPT on uniform machines (Gonzalez, Ibarra, Sahni, SIAM J.
    Comput. 6, 1977): the longest time is at most the ideal one plus that of one row at the mean
    speed, and at most 1 + 1/sqrt(3) of the best possible (Kovacs, SIAM J. Discrete Math. 24, 2010).

    All ranks get as many micro-batches as the rank that needs most. If one micro-batch less saves
    more time than equal finishing times do, ranks get no more rows than fit.

    Args:
        lengths: tokens of each row of the batch, shape [B].
        num_ranks: number of data-parallel ranks.
        work: cost model of a row.
        tokens_per_micro_batch: maximum number of tokens in a micro-batch.
        multiple: the number of micro-batches of every rank is a multiple of this.
        speeds: speeds of the ranks; empty if they are equally fast.
        budgets: token budget of each rank's micro-batches, if some have room for fewer than
            `tokens_per_micro_batch`; empty if all have room for that many.

    Raises:
        ValueError: a row alone exceeds a token budget, or the number of speeds or budgets is not
            the number of ranks.
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
    # A stable sort, so that the deal is the same on every machine.
    by_length = np.argsort(-lengths, kind="stable")
    if len(set(speeds)) > 1 or len(set(each)) > 1:
        rank_speeds = speeds or (FULL_SPEED,) * num_ranks
        rows, imbalance = _assign_by_speed(by_length, lengths, work, rank_speeds, each, multiple)
    else:
        rows, imbalance = _assign_equally(by_length, lengths, work, num_ranks)
    return Deal(hands=split_into_micro_batches(rows, lengths, each, multiple), imbalance=imbalance)


def split_into_micro_batches(
    rows: Sequence[Ints], lengths: Ints, budgets: Sequence[int], multiple: int = 1
) -> tuple[Hand, ...]:
    """Divide each rank's rows, in their order, into the smallest common number of micro-batches.

    Args:
        rows: indices into the batch for each rank.
        lengths: tokens of each row of the batch, shape [B]; each fits a micro-batch.
        budgets: maximum number of tokens in a micro-batch, for each rank.
        multiple: the number of micro-batches is a multiple of this.
    """
    count = num_micro_batches(rows, lengths, budgets, multiple)
    return tuple(
        Hand(rows=rank_rows, cuts=cut_into_parts(lengths[rank_rows], count, budget))
        for rank_rows, budget in zip(rows, budgets, strict=True)
    )


def num_micro_batches(
    rows: Sequence[Ints], lengths: Ints, budgets: Sequence[int], multiple: int = 1
) -> int:
    """Return the number of micro-batches of every rank, as `split_into_micro_batches` makes
    them."""
    each = zip(rows, budgets, strict=True)
    count = max(count_greedy_parts(lengths[rank_rows], budget) for rank_rows, budget in each)
    return count + -count % multiple


def _assign_equally(
    rows: Ints, lengths: Ints, work: WorkModel, num_ranks: int
) -> tuple[list[Ints], float]:
    """Return each rank's rows, in the given order, and the largest work of a rank over the mean."""
    if num_ranks == 1:
        return [rows], 1.0
    costs = work(lengths[rows])
    ranks = assign_least_loaded(costs, num_ranks)
    parts = _group_by_rank(rows, ranks, num_ranks)
    loads = np.bincount(ranks, weights=costs, minlength=num_ranks)
    mean = loads.mean()
    return parts, float(loads.max() / mean) if mean else 1.0


def _assign_by_speed(
    rows: Ints,
    lengths: Ints,
    work: WorkModel,
    speeds: Speeds,
    budgets: Sequence[int],
    multiple: int,
) -> tuple[list[Ints], float]:
    """Return each rank's rows, in the given order, and the slowest rank's time over the ideal
    time."""

    def count(ranks: Ints) -> int:
        return num_micro_batches(
            _group_by_rank(rows, ranks, len(speeds)), lengths, budgets, multiple
        )

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
    return _group_by_rank(rows, shares.ranks, len(speeds)), shares.imbalance


def _group_by_rank(rows: Ints, ranks: Ints, num_ranks: int) -> list[Ints]:
    """Group rows by their rank, and keep their order."""
    grouped = rows[np.argsort(ranks, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1])


def assign_least_loaded(costs: Ints, num_ranks: int) -> Ints:
    """Return the rank of each row: rows in the given order, each to the rank with the least cost so
    far.

    Ties go to the lowest rank.
    """
    # Entries are load * num_ranks + rank: one integer that orders by load and then by rank.
    heap = list(range(num_ranks))
    ranks = []
    for cost in costs.tolist():
        rank = heap[0] % num_ranks
        ranks.append(rank)
        heapq.heapreplace(heap, heap[0] + cost * num_ranks)
    return np.array(ranks, dtype=np.int64)


def count_greedy_parts(lengths: Ints, budget: int) -> int:
    """Return the number of micro-batches, at least 1, if rows are taken in order while they fit."""
    return len(_greedy_starts(lengths, budget))


def cut_into_parts(lengths: Ints, num_micro_batches: int, budget: int) -> Ints:
    """Divide rows, in order, into parts of about equal tokens that hold at most `budget` each.

    Args:
        lengths: tokens of each row.
        num_micro_batches: number of parts, at least `count_greedy_parts` of the same rows.
        budget: maximum number of tokens in a part.

    Returns:
        The cuts, shape [num_micro_batches + 1]. The last parts may be empty.
    """
    if num_micro_batches == 1:
        return np.array([0, len(lengths)], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    targets = ends[-1] * np.arange(num_micro_batches + 1) / num_micro_batches
    cuts: Ints = np.searchsorted(ends, targets, side="left").astype(np.int64)
    cuts[0], cuts[-1] = 0, len(lengths)
    if np.all(np.diff(ends[cuts]) <= budget):
        return cuts
    # Equal parts would exceed the budget.
    starts = _greedy_starts(lengths, budget)
    missing = num_micro_batches + 1 - len(starts)
    return np.array(starts + [len(lengths)] * missing, dtype=np.int64)


def _greedy_starts(lengths: Ints, budget: int) -> list[int]:
    """Return the first row of each part if rows are taken in order while they fit `budget`."""
    starts, filled = [0], 0
    for row, length in enumerate(lengths.tolist()):
        if filled + length > budget:
            starts.append(row)
            filled = 0
        filled += length
    return starts
