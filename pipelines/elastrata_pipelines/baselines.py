"""Baselines: the same global batches under the deal and under other known ways to share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from elastrata_pipelines.balance import padded_tokens
from elastrata_pipelines.deal import Ints, WorkModel, cut_hands, deal


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


@dataclass(frozen=True, kw_only=True)
class SchemeBalance:
    """The balance of some steps under one scheme. Imbalance is a rank's largest work over the
    mean."""

    scheme: str
    imbalance_max_over_mean: float
    """Mean over the steps."""
    imbalance_worst: float
    """Imbalance of the worst step."""
    micro_batches: float
    """Micro-batches of one rank in a step, mean over the steps."""
    padding_fraction: float
    """Share of padding, were every micro-batch padded to its longest row."""


@dataclass(frozen=True)
class _Shared:
    """One global batch, shared among the ranks."""

    loads: Ints
    """Work of each rank."""
    micro_batches: int
    """Micro-batches of each rank."""
    padded_tokens: int
    """Tokens of all ranks, with padding."""


Scheme = Callable[[Ints], Sequence[Ints]]
"""From the lengths of a batch's rows to each rank's rows."""


def compare(
    batches: Iterable[Ints],
    *,
    workers: int,
    tokens_per_micro_batch: int,
    work: WorkModel,
    seq_len: int,
    ranks_per_node: int,
) -> tuple[SchemeBalance, ...]:
    """Shares the same global batches, given as the lengths of their rows, by every scheme.

    Args:
        batches: lengths of the rows of each batch.
        workers: number of data-parallel ranks.
        tokens_per_micro_batch: no micro-batch holds more tokens.
        work: the cost of a row.
        seq_len: tokens of a bin of first-fit packing, which costs what a row of that length does.
        ranks_per_node: ranks that exchange rows with each other.

    Returns:
        The deal first.

    Raises:
        ValueError: a row alone exceeds the token budget, or there is no batch.
    """
    batches = list(batches)
    if not batches:
        raise ValueError("no batch to compare")
    budget = tokens_per_micro_batch
    schemes_by_name = {"deal": _deal(workers, work, budget), **_others(workers, ranks_per_node)}
    shared = {
        name: [_shared(scheme(lengths), lengths, work, budget) for lengths in batches]
        for name, scheme in schemes_by_name.items()
    }
    shared["first_fit"] = [_packed(lengths, workers, work, seq_len, budget) for lengths in batches]
    tokens = sum(int(lengths.sum()) for lengths in batches)
    return tuple(_balance(name, of_batches, tokens) for name, of_batches in shared.items())


def _deal(workers: int, work: WorkModel, tokens_per_micro_batch: int) -> Scheme:
    def dealt(lengths: Ints) -> list[Ints]:
        found = deal(
            lengths, num_ranks=workers, work=work, tokens_per_micro_batch=tokens_per_micro_batch
        )
        return [hand.rows for hand in found.hands]

    return dealt


def _others(workers: int, ranks_per_node: int) -> dict[str, Scheme]:
    return {
        "random": lambda lengths: random(lengths, workers),
        "stratified": lambda lengths: stratified(lengths, workers),
        "exchanged_in_nodes": lambda lengths: exchanged_in_nodes(lengths, workers, ranks_per_node),
        "sorted_round_robin": lambda lengths: sorted_round_robin(lengths, workers),
        "sorted_to_and_fro": lambda lengths: sorted_to_and_fro(lengths, workers),
    }


def _balance(scheme: str, shared: Sequence[_Shared], tokens: int) -> SchemeBalance:
    imbalances = [float(one.loads.max() / one.loads.mean()) for one in shared]
    return SchemeBalance(
        scheme=scheme,
        imbalance_max_over_mean=float(np.mean(imbalances)),
        imbalance_worst=max(imbalances),
        micro_batches=float(np.mean([one.micro_batches for one in shared])),
        padding_fraction=1 - tokens / sum(one.padded_tokens for one in shared),
    )


def _shared(rows: Sequence[Ints], lengths: Ints, work: WorkModel, budget: int) -> _Shared:
    hands = cut_hands(rows, lengths, [budget] * len(rows))
    costs = work(lengths)
    return _Shared(
        loads=np.array([costs[hand.rows].sum() for hand in hands], dtype=np.int64),
        micro_batches=len(hands[0].cuts) - 1,
        padded_tokens=padded_tokens(hands, lengths),
    )


def _packed(lengths: Ints, num_ranks: int, work: WorkModel, seq_len: int, budget: int) -> _Shared:
    """Rows packed into bins, which are padded to `seq_len` and dealt in turn."""
    num_bins = int(first_fit(lengths, seq_len).max()) + 1
    bins_of_ranks = np.bincount(np.arange(num_bins) % num_ranks, minlength=num_ranks)
    bins_per_micro_batch = max(1, budget // seq_len)
    return _Shared(
        loads=bins_of_ranks * work(seq_len),
        micro_batches=int(-(-bins_of_ranks.max() // bins_per_micro_batch)),
        padded_tokens=num_bins * seq_len,
    )
