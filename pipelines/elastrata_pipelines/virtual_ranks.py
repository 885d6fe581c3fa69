"""Virtual ranks: a division of every global batch that stays the same at any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.deal import Deal, Hand, WorkModel, deal


def num_rounds(virtual_ranks: int, num_ranks: int) -> int:
    """How many virtual ranks the busiest rank plays, one after the other."""
    return -(-virtual_ranks // num_ranks)


def deal_to_virtual(
    lengths: npt.ArrayLike,
    *,
    virtual_ranks: int,
    num_ranks: int,
    work: WorkModel,
    tokens_per_micro_batch: int,
    multiple: int = 1,
) -> Deal:
    """Deals a global batch to virtual ranks, and these in turn to ranks: v is played by rank
    v mod num_ranks, in round v // num_ranks.

    Every hand has micro-batches for `num_rounds` rounds, equally many in each; those of a round in
    which a rank has no virtual rank left are empty.

    Args:
        lengths: tokens of each row of the batch, shape [B].
        virtual_ranks: number of parts; what is in them does not depend on `num_ranks`.
        num_ranks: number of data-parallel ranks.
        work: the cost of a row.
        tokens_per_micro_batch: no micro-batch holds more tokens.
        multiple: every virtual rank gets a multiple of so many micro-batches.

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
    rounds = num_rounds(virtual_ranks, num_ranks)
    hands = tuple(_joined(parts.hands[rank::num_ranks], rounds) for rank in range(num_ranks))
    loads = [int(work(lengths[hand.rows]).sum()) for hand in hands]
    mean = sum(loads) / num_ranks
    return Deal(hands=hands, imbalance=max(loads) / mean if mean else 1.0)


def _joined(hands: Sequence[Hand], rounds: int) -> Hand:
    """One hand of several, in order, with empty micro-batches for the rounds that are left."""
    cuts, rows = [0], 0
    for hand in hands:
        cuts += (hand.cuts[1:] + rows).tolist()
        rows += len(hand.rows)
    num_micro_batches = len(hands[0].cuts) - 1
    cuts += [rows] * (num_micro_batches * (rounds - len(hands)))
    return Hand(
        rows=np.concatenate([hand.rows for hand in hands]), cuts=np.array(cuts, dtype=np.int64)
    )
