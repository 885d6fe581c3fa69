"""Balance: measures how equal the work of ranks is, and how much padding micro-batches need."""

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
    """Means over several steps. Imbalance is the largest work of a rank over the mean work."""

    steps: int
    imbalance_max_over_mean: float
    imbalance_worst: float
    """Imbalance of the worst step."""
    imbalance_least: float
    """Lower bound for any deal of whole rows: of the k W + 1 longest rows, one of W ranks gets k
    + 1."""
    imbalance_random: float
    """Imbalance if every rank gets equally many consecutive rows of the batch."""
    micro_batches: float
    """Micro-batches of one rank in a step."""
    padding_fraction: float
    """Share of padding if every micro-batch were padded to its longest row."""
    padding_random: float
    """Padding of equally many micro-batches that hold equally many rows each, in batch order."""
    padding_to_longest: float
    """Padding if every row were padded to the longest sample of all batches."""


def measure_balance(
    batches: Iterable[Ints], *, workers: int, tokens_per_micro_batch: int, work: WorkModel
) -> Balance:
    """Deal global batches, given as the lengths of their rows, and measure the result.

    Raises:
        ValueError: a row alone exceeds the token budget, or there is no batch.
    """
    imbalances, least_imbalances, random_imbalances, counts = [], [], [], []
    rows = tokens = padded = padded_random = longest = 0
    for lengths in batches:
        batch_deal = deal(
            lengths,
            num_ranks=workers,
            work=work,
            tokens_per_micro_batch=tokens_per_micro_batch,
        )
        imbalances.append(batch_deal.imbalance)
        least_imbalances.append(_least_imbalance(lengths, workers, work))
        random_imbalances.append(_random_imbalance(lengths, workers, work))
        counts.append(len(batch_deal.hands[0].cuts) - 1)
        padded += tokens_with_padding(batch_deal.hands, lengths)
        # As many micro-batches as the deal has, for a fair comparison.
        padded_random += _padded_random(lengths, _num_filled(batch_deal.hands))
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
    # Entry k is the (k W + 1)-th largest cost: k + 1 rows of at least that cost share a rank.
    every_wth = costs[::workers]
    largest = int((every_wth * np.arange(1, len(every_wth) + 1)).max())
    return max(1.0, largest * workers / int(costs.sum()))


def _random_imbalance(lengths: Ints, workers: int, work: WorkModel) -> float:
    loads = [int(work(part).sum()) for part in np.array_split(lengths, workers)]
    return max(loads) * workers / sum(loads)


def tokens_with_padding(hands: Iterable[Hand], lengths: Ints) -> int:
    """Return the tokens of all micro-batches if each is padded to its longest row.

    Args:
        hands: micro-batches with the rows of each rank.
        lengths: tokens of each row of the batch, shape [B].
    """
    return sum(
        int(end - begin) * int(lengths[hand.rows[begin:end]].max())
        for hand in hands
        for begin, end in zip(hand.cuts[:-1], hand.cuts[1:], strict=True)
        if end > begin
    )


def _num_filled(rank_hands: Iterable[Hand]) -> int:
    """Return the number of micro-batches that hold rows."""
    return sum(int(np.count_nonzero(np.diff(hand.cuts))) for hand in rank_hands)


def _padded_random(lengths: Ints, num_micro_batches: int) -> int:
    parts = np.array_split(lengths, num_micro_batches)
    return sum(len(part) * int(part.max()) for part in parts)


def batches_of_order(
    lengths: npt.NDArray[np.int32], order: Order, *, batch_size: int, steps: int
) -> Iterator[Ints]:
    """Yield the lengths of the first `steps` global batches of an order.

    Args:
        lengths: lengths of all samples in stored order.
        order: order of the samples.
        batch_size: samples per step.
        steps: number of batches.
    """
    for step in range(steps):
        places = order.places(step * batch_size, batch_size)
        # Only the last stripe is short, so a stripe begins at its number times the stripe size.
        yield lengths[places.stripes * order.stripe_size + places.rows].astype(np.int64)


def batches_of_mixture(
    lengths: Sequence[npt.NDArray[np.int32]], order: MixedOrder, *, batch_size: int, steps: int
) -> Iterator[Ints]:
    """Yield the lengths of the first `steps` global batches of a mixture.

    Args:
        lengths: lengths of all samples of each source, in stored order.
        order: order of the samples.
        batch_size: samples per step.
        steps: number of batches.
    """
    for step in range(steps):
        places = order.places(step * batch_size, batch_size)
        batch = np.empty(batch_size, np.int64)
        for source, (source_lengths, source_order) in enumerate(
            zip(lengths, order.orders, strict=True)
        ):
            inside = places.sources == source
            batch[inside] = source_lengths[
                places.stripes[inside] * source_order.stripe_size + places.rows[inside]
            ]
        yield batch


def draw_batches(
    histogram: npt.ArrayLike, *, batch_size: int, steps: int, seed: int = 0
) -> Iterator[Ints]:
    """Yield random batches of lengths, where `histogram[s]` is the number of samples of length
    s."""
    ends = np.cumsum(np.asarray(histogram, dtype=np.float64))
    for step in range(steps):
        draws = uniform(combine(key(seed, step), np.arange(batch_size, dtype=np.uint64)))
        yield np.searchsorted(ends, draws * ends[-1], side="right").astype(np.int64)
