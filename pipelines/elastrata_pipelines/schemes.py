"""Schemes: the known ways to share a global batch among ranks, which the deal is held against.

Numbers in, numbers out: from the lengths of the batch's rows, shape [B], to each rank's rows,
indices into the batch, in the order in which they go to micro-batches. A batch comes in random
order; where a scheme leaves something to chance, it takes the rows as they come.
"""

from __future__ import annotations

import numpy as np

from elastrata_pipelines.deal import Ints


def random(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Every rank takes as many consecutive rows as the others, give or take one.

    What PyTorch's DistributedSampler comes to.
    """
    return np.array_split(np.arange(len(lengths), dtype=np.int64), num_ranks)


def stratified(lengths: Ints, num_ranks: int) -> list[Ints]:
    """Every rank takes a row of each stratum; a stratum is `num_ranks` rows of about one length.

    Stratification as for MLPerf BERT (arXiv 2402.02447), with the finest strata there can be.
    """
    by_length = np.argsort(-lengths, kind="stable")
    strata = [np.sort(by_length[i : i + num_ranks]) for i in range(0, len(lengths), num_ranks)]
    rank_of_row = np.concatenate([np.arange(len(s), dtype=np.int64) for s in strata])
    return _rows_of_ranks(np.concatenate(strata), rank_of_row, num_ranks)


def exchanged_in_nodes(lengths: Ints, num_ranks: int, ranks_per_node: int) -> list[Ints]:
    """Stratified; then the ranks of a node pool their rows, sort them and deal them to and fro.

    Stratification and exchange as for MLPerf BERT (arXiv 2402.02447).
    """
    shares = stratified(lengths, num_ranks)
    exchanged = []
    for first in range(0, num_ranks, ranks_per_node):
        node = shares[first : first + ranks_per_node]
        pool = np.concatenate(node)
        by_length = pool[np.argsort(-lengths[pool], kind="stable")]
        exchanged += _rows_of_ranks(by_length, _to_and_fro(len(pool), len(node)), len(node))
    return exchanged


def sorted_round_robin(lengths: Ints, num_ranks: int) -> list[Ints]:
    """The whole batch is sorted by length and dealt in turn: 0 1 2 0 1 2.

    The exchange over all ranks of MLPerf BERT (arXiv 2402.02447) without reversal.
    """
    by_length = np.argsort(-lengths, kind="stable")
    return _rows_of_ranks(by_length, np.arange(len(lengths)) % num_ranks, num_ranks)


def sorted_to_and_fro(lengths: Ints, num_ranks: int) -> list[Ints]:
    """The whole batch is sorted by length and dealt to and fro, as a snake: 0 1 2 2 1 0.

    The exchange over all ranks of MLPerf BERT (arXiv 2402.02447) with reversal.
    """
    by_length = np.argsort(-lengths, kind="stable")
    return _rows_of_ranks(by_length, _to_and_fro(len(lengths), num_ranks), num_ranks)


def first_fit(lengths: Ints, capacity: int) -> Ints:
    """The bin of each row, shape [B]: longest row first, each to the first bin with room for it.

    First-fit decreasing (Johnson et al., SIAM J. Comput. 3, 1974); for BERT see Krell et al.
    (arXiv 2107.02027).

    Args:
        lengths: tokens of each row, none more than `capacity`.
        capacity: tokens that a bin holds.
    """
    width = 1 << max(0, len(lengths) - 1).bit_length()
    room = [capacity] * (
        2 * width
    )  # a tree: bin i is its leaf width + i, a node has most of its two
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


def _to_and_fro(num_rows: int, num_ranks: int) -> Ints:
    turns, places = np.divmod(np.arange(num_rows, dtype=np.int64), num_ranks)
    return np.where(turns % 2, num_ranks - 1 - places, places)


def _rows_of_ranks(rows: Ints, rank_of_row: Ints, num_ranks: int) -> list[Ints]:
    """The rows of each rank, in the order given."""
    sizes = np.bincount(rank_of_row, minlength=num_ranks)
    return np.split(rows[np.argsort(rank_of_row, kind="stable")], np.cumsum(sizes)[:-1])
