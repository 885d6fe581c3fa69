"""Baselines: compares the deal with other published ways to divide the same global batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from elastrata_pipelines.balance import tokens_with_padding
from elastrata_pipelines.deal import Ints, WorkModel, deal, split_into_micro_batches


def assign_consecutive(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Give every rank equally many consecutive rows, as PyTorch's DistributedSampler does."""
    return np.array_split(np.arange(len(lengths), dtype=np.int64), num_ranks)


def assign_stratified(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Give every rank one row of each stratum; a stratum is `num_ranks` rows of similar length.

    This is the stratification of MLPerf BERT (arXiv 2402.02447) with the finest possible strata.
    """
    by_length = np.argsort(-lengths, kind="stable")
    strata = [np.sort(by_length[i : i + num_ranks]) for i in range(0, len(lengths), num_ranks)]
    rank_of_row = np.concatenate([np.arange(len(s), dtype=np.int64) for s in strata])
    return _rows_of_ranks(np.concatenate(strata), rank_of_row, num_ranks)


def assign_exchanged_in_nodes(lengths: Ints, num_ranks: int, ranks_per_node: int) -> list[Ints]:
    """Stratify rows, then let the ranks of each node sort their rows and deal them in alternating
    order.

    This is the stratification and exchange of MLPerf BERT (arXiv 2402.02447).
    """
    shares = assign_stratified(lengths, num_ranks)
    exchanged = []
    for first in range(0, num_ranks, ranks_per_node):
        node = shares[first : first + ranks_per_node]
        pool = np.concatenate(node)
        by_length = pool[np.argsort(-lengths[pool], kind="stable")]
        exchanged += _rows_of_ranks(by_length, _alternating_ranks(len(pool), len(node)), len(node))
    return exchanged


def assign_round_robin(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Sort the whole batch by length and deal it in turn: 0 1 2 0 1 2.

    This is the exchange over all ranks of MLPerf BERT (arXiv 2402.02447) without reversal.
    """
    by_length = np.argsort(-lengths, kind="stable")
    return _rows_of_ranks(by_length, np.arange(len(lengths)) % num_ranks, num_ranks)


def assign_alternating(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Sort the whole batch by length and deal it in alternating order: 0 1 2 2 1 0.

    This is the exchange over all ranks of MLPerf BERT (arXiv 2402.02447) with reversal.
    """
    by_length = np.argsort(-lengths, kind="stable")
    return _rows_of_ranks(by_length, _alternating_ranks(len(lengths), num_ranks), num_ranks)


def pack_first_fit(lengths: Ints, capacity: int) -> Ints:
    """Return the bin of each row, shape [B]: longest row first, each to the first bin with room for
    it.

    This is first-fit decreasing (Johnson et al., SIAM J. Comput. 3, 1974); for BERT see Krell et
    al. (arXiv 2107.02027).

    Args:
        lengths: tokens of each row, none above `capacity`.
        capacity: tokens that a bin holds.
    """
    width = 1 << max(0, len(lengths) - 1).bit_length()
    # A binary tree: bin i is leaf width + i, and a node holds the larger room of its two children.
    # Finding the first bin that fits takes logarithmic time.
    room = [capacity] * (2 * width)
    bins = np.empty(len(lengths), dtype=np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    for row, length in zip(by_length.tolist(), lengths[by_length].tolist(), strict=True):
        node = 1
        while node < width:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        bins[row] = node - width
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _alternating_ranks(num_rows: int, num_ranks: int) -> Ints:
    turns, places = np.divmod(np.arange(num_rows, dtype=np.int64), num_ranks)
    return np.where(turns % 2, num_ranks - 1 - places, places)


def _rows_of_ranks(rows: Ints, rank_of_row: Ints, num_ranks: int) -> list[Ints]:
    """Return the rows of each rank, in the given order."""
    sizes = np.bincount(rank_of_row, minlength=num_ranks)
    return np.split(rows[np.argsort(rank_of_row, kind="stable")], np.cumsum(sizes)[:-1])


@dataclass(frozen=True, kw_only=True)
class SchemeBalance:
    """Balance of several steps under one scheme. Imbalance is a rank's largest work over the
    mean."""

    scheme: str
    imbalance_max_over_mean: float
    """Mean over the steps."""
    imbalance_worst: float
    """Imbalance of the worst step."""
    micro_batches: float
    """Micro-batches of one rank in a step, averaged over the steps."""
    padding_fraction: float
    """Share of padding if every micro-batch were padded to its longest row."""


@dataclass(frozen=True)
class _DividedBatch:
    """One global batch, divided among the ranks."""

    loads: Ints
    """Work of each rank."""
    micro_batches: int
    """Micro-batches of each rank."""
    padded_tokens: int
    """Tokens of all ranks, including padding."""


Scheme = Callable[[Ints], Sequence[Ints]]
"""Function from the lengths of a batch's rows to each rank's rows."""


def compare(
    batches: Iterable[Ints],
    *,
    workers: int,
    tokens_per_micro_batch: int,
    work: WorkModel,
    seq_len: int,
    ranks_per_node: int,
) -> tuple[SchemeBalance, ...]:
    """Divide the same global batches, given as the lengths of their rows, by every scheme.

    Args:
        batches: lengths of the rows of each batch.
        workers: number of data-parallel ranks.
        tokens_per_micro_batch: maximum number of tokens in a micro-batch.
        work: cost model of a row.
        seq_len: tokens of a bin of first-fit packing, which costs as much as a row of that length.
        ranks_per_node: number of ranks that exchange rows with each other.

    Returns:
        One balance per scheme; the deal comes first.

    Raises:
        ValueError: a row alone exceeds the token budget, or there is no batch.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("no batch to compare")
    budget = tokens_per_micro_batch
    schemes_by_name = {"deal": _deal(workers, work, budget), **_others(workers, ranks_per_node)}
    shared = {
        name: [_divide(scheme(lengths), lengths, work, budget) for lengths in batches]
        for name, scheme in schemes_by_name.items()
    }
    shared["first_fit"] = [
        _divide_packed(lengths, workers, work, seq_len, budget) for lengths in batches
    ]
    tokens = sum(int(lengths.sum()) for lengths in batches)
    return tuple(_balance(name, of_batches, tokens) for name, of_batches in shared.items())


def _deal(workers: int, work: WorkModel, tokens_per_micro_batch: int) -> Scheme:
    def deal_rows(lengths: Ints) -> list[Ints]:
        batch_deal = deal(
            lengths, num_ranks=workers, work=work, tokens_per_micro_batch=tokens_per_micro_batch
        )
        return [hand.rows for hand in batch_deal.hands]

    return deal_rows


def _others(workers: int, ranks_per_node: int) -> dict[str, Scheme]:
    return {
        "random": lambda lengths: assign_consecutive(lengths, workers),
        "stratified": lambda lengths: assign_stratified(lengths, workers),
        "exchanged_in_nodes": lambda lengths: assign_exchanged_in_nodes(
            lengths, workers, ranks_per_node
        ),
        "sorted_round_robin": lambda lengths: assign_round_robin(lengths, workers),
        "sorted_to_and_fro": lambda lengths: assign_alternating(lengths, workers),
    }


def _balance(scheme: str, shared: Sequence[_DividedBatch], tokens: int) -> SchemeBalance:
    imbalances = [float(batch.loads.max() / batch.loads.mean()) for batch in shared]
    return SchemeBalance(
        scheme=scheme,
        imbalance_max_over_mean=float(np.mean(imbalances)),
        imbalance_worst=max(imbalances),
        micro_batches=float(np.mean([batch.micro_batches for batch in shared])),
        padding_fraction=1 - tokens / sum(batch.padded_tokens for batch in shared),
    )


def _divide(rows: Sequence[Ints], lengths: Ints, work: WorkModel, budget: int) -> _DividedBatch:
    rank_hands = split_into_micro_batches(rows, lengths, [budget] * len(rows))
    costs = work(lengths)
    return _DividedBatch(
        loads=np.array([costs[hand.rows].sum() for hand in rank_hands], dtype=np.int64),
        micro_batches=len(rank_hands[0].cuts) - 1,
        padded_tokens=tokens_with_padding(rank_hands, lengths),
    )


def _divide_packed(
    lengths: Ints, num_ranks: int, work: WorkModel, seq_len: int, budget: int
) -> _DividedBatch:
    """Pack rows into bins, which are padded to `seq_len` and dealt in turn."""
    num_bins = int(pack_first_fit(lengths, seq_len).max()) + 1
    bins_of_ranks = np.bincount(np.arange(num_bins) % num_ranks, minlength=num_ranks)
    bins_per_micro_batch = max(1, budget // seq_len)
    return _DividedBatch(
        loads=bins_of_ranks * work(seq_len),
        micro_batches=int(-(-bins_of_ranks.max() // bins_per_micro_batch)),
        padded_tokens=num_bins * seq_len,
    )
