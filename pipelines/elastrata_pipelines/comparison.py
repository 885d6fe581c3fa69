"""The comparison: the same global batches under the deal and under the other schemes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from elastrata_pipelines import schemes
from elastrata_pipelines.balance import padded_tokens
from elastrata_pipelines.deal import Ints, WorkModel, cut_hands, deal


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
        "random": lambda lengths: schemes.random(lengths, workers),
        "stratified": lambda lengths: schemes.stratified(lengths, workers),
        "exchanged_in_nodes": lambda lengths: schemes.exchanged_in_nodes(
            lengths, workers, ranks_per_node
        ),
        "sorted_round_robin": lambda lengths: schemes.sorted_round_robin(lengths, workers),
        "sorted_to_and_fro": lambda lengths: schemes.sorted_to_and_fro(lengths, workers),
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
    num_bins = int(schemes.first_fit(lengths, seq_len).max()) + 1
    bins_of_ranks = np.bincount(np.arange(num_bins) % num_ranks, minlength=num_ranks)
    bins_per_micro_batch = max(1, budget // seq_len)
    return _Shared(
        loads=bins_of_ranks * work(seq_len),
        micro_batches=int(-(-bins_of_ranks.max() // bins_per_micro_batch)),
        padded_tokens=num_bins * seq_len,
    )
