"""Balance: how equal the work of ranks is, and how much padding micro-batches need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.deal import Hand, Ints, WorkModel, deal
from elastrata_pipelines.hashing import combine, key, uniform
from elastrata_pipelines.mixture import MixedOrder
from elastrata_pipelines.order import Order


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Means over some steps. Imbalance is the largest work of a rank over the mean work."""

    steps: int
    imbalance_max_over_mean: float
    imbalance_worst: float
    """Imbalance of the worst step."""
    imbalance_least: float
    """No deal of whole rows can do better than this: of the k W + 1 longest rows, some rank of W
    gets k + 1."""
    imbalance_random: float
    """Where every rank gets consecutive rows of the batch, as many as the others."""
    micro_batches: float
    """Micro-batches of one rank in a step."""
    padding_fraction: float
    """Share of padding, were every micro-batch padded to its longest row."""
    padding_random: float
    """Padding of micro-batches of as many rows each, in the order of the batch."""
    padding_to_longest: float
    """Padding, were every row padded to the longest sample seen."""


def measure_balance(
    batches: Iterable[Ints], *, workers: int, tokens_per_micro_batch: int, work: WorkModel
) -> Balance:
    """Deals global batches, given as the lengths of their rows, and looks at the result.

    Raises:
        ValueError: a row alone exceeds the token budget, or there is no batch.
    """
    imbalances, least_imbalances, random_imbalances, counts = [], [], [], []
    rows = tokens = padded = padded_random = longest = 0
    for lengths in batches:
        dealt = deal(
            lengths,
            num_ranks=workers,
            work=work,
            tokens_per_micro_batch=tokens_per_micro_batch,
        )
        imbalances.append(dealt.imbalance)
        least_imbalances.append(_least_imbalance(lengths, workers, work))
        random_imbalances.append(_random_imbalance(lengths, workers, work))
        counts.append(len(dealt.hands[0].cuts) - 1)
        padded += padded_tokens(dealt.hands, lengths)
        padded_random += _padded_random(lengths, _filled(dealt.hands))
        rows, tokens = rows + len(lengths), tokens + int(lengths.sum())
        longest = max(longest, int(lengths.max()))
    if not imbalances:
        raise ValueError("no batch to measure")
    return Balance(
        steps=len(imbalances),
        imbalance_max_over_mean=float(np.mean(imbalances)),
        imbalance_worst=max(imbalances),
        imbalance_least=float(np.mean(least_imbalances)),
        imbalance_random=float(np.mean(random_imbalances)),
        micro_batches=float(np.mean(counts)),
        padding_fraction=1 - tokens / padded,
        padding_random=1 - tokens / padded_random,
        padding_to_longest=1 - tokens / (rows * longest),
    )


def _least_imbalance(lengths: Ints, workers: int, work: WorkModel) -> float:
    costs = np.sort(work(lengths))[::-1]
    every_wth = costs[::workers]
    largest = int((every_wth * np.arange(1, len(every_wth) + 1)).max())
    return max(1.0, largest * workers / int(costs.sum()))


def _random_imbalance(lengths: Ints, workers: int, work: WorkModel) -> float:
    loads = [int(work(part).sum()) for part in np.array_split(lengths, workers)]
    return max(loads) * workers / sum(loads)


def padded_tokens(hands: Iterable[Hand], lengths: Ints) -> int:
    """Tokens of all micro-batches, were each padded to its longest row.

    Args:
        hands: rows of the batch in micro-batches.
        lengths: tokens of each row of the batch, shape [B].
    """
    return sum(
        int(end - begin) * int(lengths[hand.rows[begin:end]].max())
        for hand in hands
        for begin, end in zip(hand.cuts[:-1], hand.cuts[1:], strict=True)
        if end > begin
    )


def _filled(hands: Iterable[Hand]) -> int:
    """Micro-batches that hold rows."""
    return sum(int(np.count_nonzero(np.diff(hand.cuts))) for hand in hands)


def _padded_random(lengths: Ints, num_micro_batches: int) -> int:
    parts = np.array_split(lengths, num_micro_batches)
    return sum(len(part) * int(part.max()) for part in parts)


def ordered_batches(
    lengths: npt.NDArray[np.int32], order: Order, *, batch_size: int, steps: int
) -> Iterator[Ints]:
    """Lengths of the first `steps` global batches of an order.

    Args:
        lengths: of all samples in stored order.
        order: where the sample at each position is stored.
        batch_size: samples per step.
        steps: how many batches.
    """
    for step in range(steps):
        places = order.places(step * batch_size, batch_size)
        yield lengths[places.stripes * order.stripe_size + places.rows].astype(np.int64)


def mixed_batches(
    lengths: Sequence[npt.NDArray[np.int32]], order: MixedOrder, *, batch_size: int, steps: int
) -> Iterator[Ints]:
    """As `ordered_batches`, of a mixture.

    Args:
        lengths: of all samples of each source, in stored order.
        order: where the sample at each position is stored.
        batch_size: samples per step.
        steps: how many batches.
    """
    for step in range(steps):
        places = order.places(step * batch_size, batch_size)
        batch = np.empty(batch_size, np.int64)
        for source, (own, one) in enumerate(zip(lengths, order.orders, strict=True)):
            inside = places.sources == source
            batch[inside] = own[places.stripes[inside] * one.stripe_size + places.rows[inside]]
        yield batch


def drawn_batches(
    histogram: npt.ArrayLike, *, batch_size: int, steps: int, seed: int = 0
) -> Iterator[Ints]:
    """Random batches of lengths, `histogram[s]` being the number of samples of length s."""
    ends = np.cumsum(np.asarray(histogram, dtype=np.float64))
    for step in range(steps):
        draws = uniform(combine(key(seed, step), np.arange(batch_size, dtype=np.uint64)))
        yield np.searchsorted(ends, draws * ends[-1], side="right").astype(np.int64)
