"""Virtual ranks: a division of every global batch that stays the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.deal import Deal, Hand, WorkModel, deal
from elastrata_pipelines.speeds import Speeds


def deal_to_virtual(
    lengths: npt.ArrayLike,
    *,
    virtual_ranks: int,
    num_ranks: int,
    work: WorkModel,
    tokens_per_micro_batch: int,
    multiple: int = 1,
    speeds: Speeds = (),
) -> Deal:
    """Deals a global batch to virtual ranks, and these in turn to ranks: v is played by rank
    v mod num_ranks, in round v // num_ranks; where ranks are not equally fast, as `players` says.

    Every hand has micro-batches for all rounds, equally many in each; those of a round in which a
    rank plays no virtual rank are empty.

    Args:
        lengths: tokens of each row of the batch, shape [B].
        virtual_ranks: number of parts; what is in them depends neither on `num_ranks` nor on
            `speeds`.
        num_ranks: number of data-parallel ranks.
        work: the cost of a row.
        tokens_per_micro_batch: no micro-batch holds more tokens.
        multiple: every virtual rank gets a multiple of so many micro-batches.
        speeds: of the ranks; none: they are equally fast.

    Raises:
        ValueError: a row alone exceeds the token budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    parts = deal(
        lengths,
        num_ranks=virtual_ranks,
        work=work,
        tokens_per_micro_batch=tokens_per_micro_batch,
        multiple=multiple,
    )
    rounds = players(virtual_ranks, speeds or (1,) * num_ranks)
    hands = tuple(_joined(_played(parts.hands, rounds, rank)) for rank in range(num_ranks))
    rates = np.array(speeds or (1,) * num_ranks) / max(speeds, default=1)
    loads = np.array([work(lengths[hand.rows]).sum() for hand in hands], dtype=np.float64)
    ideal = loads.sum() / rates.sum()
    imbalance = float((loads / rates).max() / ideal) if ideal else 1.0
    return Deal(hands=hands, imbalance=imbalance, rounds=len(rounds))


@cache
def players(virtual_ranks: int, speeds: Speeds) -> tuple[tuple[int, ...], ...]:
    """The ranks that play a virtual rank in each round of a step, in the order in which these are
    played: virtual rank 0 by the first rank of the first round, and so on.

    All ranks wait for the slowest one of a round, so that a rank sits out the rounds that would
    take longer with it. That way the rounds take the least time: of n virtual ranks, the least for
    fewer of them and one round of the fastest ones. Equal times: fewer rounds.

    Args:
        virtual_ranks: to be played in all.
        speeds: of the ranks.
    """
    fastest = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
    ends = [n for n in range(1, len(fastest)) if speeds[fastest[n]] < speeds[fastest[n - 1]]]
    sizes = [*ends, len(fastest)]
    least: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for number in range(1, virtual_ranks + 1):
        options = []
        for size in sizes:
            seconds, rounds, _ = least[max(0, number - size)]
            options.append((seconds + 1 / speeds[fastest[size - 1]], rounds + 1, size))
        shortest = min(seconds for seconds, _, _ in options)
        as_short = [option for option in options if option[0] <= shortest * (1 + 1e-9)]
        least.append(min(as_short, key=lambda option: (option[1], -option[2])))
    found, left = [], virtual_ranks
    while left > 0:
        size = least[left][2]
        found.append(tuple(sorted(fastest[: min(size, left)])))
        left -= size
    return tuple(sorted(found, key=len, reverse=True))


def _played(hands: Sequence[Hand], rounds: Sequence[tuple[int, ...]], rank: int) -> list[Hand]:
    """A rank's hand in every round, an empty one where it sits it out."""
    empty = np.zeros(len(hands[0].cuts), dtype=np.int64)
    nothing = Hand(rows=empty[:0], cuts=empty)
    firsts = np.cumsum([0] + [len(ranks) for ranks in rounds])
    return [
        hands[first + ranks.index(rank)] if rank in ranks else nothing
        for first, ranks in zip(firsts, rounds, strict=False)
    ]


def _joined(hands: Sequence[Hand]) -> Hand:
    """One hand of several, in order."""
    cuts, rows = [0], 0
    for hand in hands:
        cuts += (hand.cuts[1:] + rows).tolist()
        rows += len(hand.rows)
    return Hand(
        rows=np.concatenate([hand.rows for hand in hands]), cuts=np.array(cuts, dtype=np.int64)
    )
