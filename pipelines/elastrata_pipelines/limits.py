"""Limits: how many samples of a source may be taken, and who has its share from there on."""

from __future__ import annotations

from collections.abc import Sequence

from elastrata_pipelines.mixture import Mixture


def within_limits(
    mixture: Mixture, most: Sequence[int | None], *, since: int, samples: int
) -> Mixture:
    """The mixture with the shares of exhausted sources given to the others.

    Args:
        mixture: as it would be without limits.
        most: samples of each source that it may have; None: any number.
        since: nothing before this position changes.
        samples: that are taken of it.

    Raises:
        ValueError: all sources that are left are exhausted.
    """
    exhausted = set[int]()
    while True:
        ends = [
            (max(since, mixture.position_of(source, limit + 1, samples) - 1), source)
            for source, (limit, count) in enumerate(zip(most, mixture.counts(samples), strict=True))
            if limit is not None and count > limit and source not in exhausted
        ]
        if not ends:
            return mixture
        position, source = min(ends)
        exhausted.add(source)
        mixture = mixture.without(source, position)


def evenly(total: int, most: Sequence[int]) -> list[int]:
    """Shares out so many samples as evenly as the sources have them, the first ones' rounded up.

    Args:
        total: samples; more than all have are none.
        most: that each has.
    """
    counts, left = [0] * len(most), min(total, sum(most))
    for rank, source in enumerate(sorted(range(len(most)), key=lambda n: (most[n], n))):
        counts[source] = min(most[source], left // (len(most) - rank))
        left -= counts[source]
    return counts
