"""The stored order: which sample goes to which place. Numbers in, numbers out.

All samples are shuffled by their keys, and every stripe gets its proportional share of every
stratum, a band of lengths: inside a stratum of n samples the i-th by key gets the fractional rank
(i + 1/2) / n, and the samples are stored in the order of these ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.hashing import U64

Ints = npt.NDArray[np.int64]

MAX_STRATA = 64


def strata(lengths: npt.ArrayLike) -> Ints:
    """The stratum of each sample, at most `MAX_STRATA` of them, shape [N].

    Samples of equal length share a stratum; strata hold about equal numbers of samples, as far as
    that allows.
    """
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))
    shorter = np.cumsum(counts) - counts
    band = shorter * MAX_STRATA // max(1, int(counts.sum()))
    return np.asarray(band[np.asarray(lengths)], dtype=np.int64)


def stored_order(keys: U64, lengths: npt.ArrayLike, stripe_size: int) -> Ints:
    """The samples in stored order, as indices, shape [N]: stripe after stripe.

    A stripe of m of the N samples holds of a stratum with n samples n m / N, give or take less
    than 1 + K n / N, where K is the number of strata. Inside a stripe the longest sample comes
    first. Ties go by key, then by index.

    Args:
        keys: hash of (seed, sample id) of each sample, shape [N].
        lengths: tokens of each sample, shape [N].
        stripe_size: samples per stripe; the last one may be short.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    shuffled = np.argsort(keys, kind="stable")
    stratum = strata(lengths[shuffled])
    grouped = np.argsort(stratum, kind="stable")
    sizes = np.bincount(stratum)
    firsts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(lengths), dtype=np.float64)
    place = np.arange(len(lengths)) - np.repeat(firsts, sizes)
    ranks[grouped] = (place + 0.5) / np.repeat(sizes, sizes)
    order = shuffled[np.argsort(ranks, kind="stable")]
    for first in range(0, len(order), stripe_size):
        stripe = order[first : first + stripe_size]
        by_key = stripe[np.argsort(keys[stripe], kind="stable")]
        order[first : first + stripe_size] = by_key[np.argsort(-lengths[by_key], kind="stable")]
    return order
