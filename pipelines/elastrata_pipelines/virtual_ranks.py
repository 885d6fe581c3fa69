"""Virtual ranks: a division of every global batch that does not depend on the number of ranks."""

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
    """Deal a global batch to virtual ranks, and assign the virtual ranks to ranks.

    Rank v mod num_ranks plays virtual rank v in round v // num_ranks. If ranks are not equally
    fast, `players` assigns them instead. Every hand has micro-batches for all rounds, with the same
    number in each; the micro-batches of a round in which a rank plays no virtual rank are empty.

    Args:
        lengths: tokens of each row of the batch, shape [B].
        virtual_ranks: number of parts, whose content depends neither on `num_ranks` nor on
            `speeds`.
        num_ranks: number of data-parallel ranks.
        work: cost model of a row.
        tokens_per_micro_batch: maximum number of tokens in a micro-batch.
        multiple: the number of micro-batches of every virtual rank is a multiple of this.
        speeds: speeds of the ranks; empty if they are equally fast.

    Raises:
        ValueError: a row alone exceeds the token budget.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # Without speeds: the content of a part decides gradients and must not depend on the machines.
    parts = deal(
        lengths,
        num_ranks=virtual_ranks,
        work=work,
        tokens_per_micro_batch=tokens_per_micro_batch,
        multiple=multiple,
    )
    rounds = assign_virtual_ranks(virtual_ranks, speeds or (1,) * num_ranks)
    rank_hands = tuple(
        _join(_hands_by_round(parts.hands, rounds, rank)) for rank in range(num_ranks)
    )
    rates = np.array(speeds or (1,) * num_ranks) / max(speeds, default=1)
    loads = np.array([work(lengths[hand.rows]).sum() for hand in rank_hands], dtype=np.float64)
    ideal = loads.sum() / rates.sum()
    imbalance = float((loads / rates).max() / ideal) if ideal else 1.0
    return Deal(hands=rank_hands, imbalance=imbalance, rounds=len(rounds))


@cache
def assign_virtual_ranks(virtual_ranks: int, speeds: Speeds) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that play a virtual rank in each round of a step.

    Virtual ranks are numbered in the order of the result: virtual rank 0 belongs to the first rank
    of the first round, and so on. The rounds take the least total time; of equal times, the one
    with fewer rounds is chosen.

    Args:
        virtual_ranks: number of virtual ranks to be played.
        speeds: speeds of the ranks.
    """
    fastest = sorted(range(len(speeds)), key=lambda rank: (-speeds[rank], rank))
    ends = [n for n in range(1, len(fastest)) if speeds[fastest[n]] < speeds[fastest[n - 1]]]
    sizes = [*ends, len(fastest)]
    least: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for number in range(1, virtual_ranks + 1):
        # Dynamic programming over the number of virtual ranks: a round of the `size` fastest ranks
        # takes as long as the slowest of them, so a slow rank sits out the rounds that it would
        # delay.
        options = []
        for size in sizes:
            seconds, rounds, _ = least[max(0, number - size)]
            options.append((seconds + 1 / speeds[fastest[size - 1]], rounds + 1, size))
        shortest = min(seconds for seconds, _, _ in options)
        # The tolerance makes sums of floats that differ by rounding count as equal.
        as_short = [option for option in options if option[0] <= shortest * (1 + 1e-9)]
        least.append(min(as_short, key=lambda option: (option[1], -option[2])))
    found, left = [], virtual_ranks
    while left > 0:
        size = least[left][2]
        found.append(tuple(sorted(fastest[: min(size, left)])))
        left -= size
    return tuple(sorted(found, key=len, reverse=True))


def _hands_by_round(
    virtual_hands: Sequence[Hand], rounds: Sequence[tuple[int, ...]], rank: int
) -> list[Hand]:
    """Return a rank's hand for every round, an empty one if it sits the round out."""
    empty = np.zeros(len(virtual_hands[0].cuts), dtype=np.int64)
    nothing = Hand(rows=empty[:0], cuts=empty)
    firsts = np.cumsum([0] + [len(ranks) for ranks in rounds])
    return [
        virtual_hands[first + ranks.index(rank)] if rank in ranks else nothing
        # `firsts` has one entry more than `rounds`.
        for first, ranks in zip(firsts, rounds, strict=False)
    ]


def _join(round_hands: Sequence[Hand]) -> Hand:
    """Concatenate the hands of all rounds to one."""
    cuts, rows = [0], 0
    for hand in round_hands:
        cuts += (hand.cuts[1:] + rows).tolist()
        rows += len(hand.rows)
    return Hand(
        rows=np.concatenate([hand.rows for hand in round_hands]),
        cuts=np.array(cuts, dtype=np.int64),
    )
