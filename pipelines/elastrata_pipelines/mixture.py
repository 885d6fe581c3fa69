"""The mixture: assigns a source, and a sample of that source, to every position.

This module holds pure functions of numbers.

The sources are the leaves of a binary tree. Every node divides its positions between its two
children as evenly as whole numbers allow: of its first m positions, floor(m * left / whole + 1/2)
go to the left child (a Sturmian word; Morse and Hedlund, Amer. J. Math. 62, 1940). No random
numbers are involved, so the counts at any position follow from arithmetic.

With two sources, every window of k positions contains k times their share, with an error below one
sample. With three or more sources no order achieves that, except for a few special shares
(Tijdeman, Indag. Math. 83, 1980; Fraenkel's conjecture). With three sources, the error is below two
for any window and below one for the first k positions. `Mixture.largest_error` gives the bound for
any shares.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.order import Order, Places

Ints = npt.NDArray[np.int64]

UNITS = 2**32
"""Sum of all shares, which are whole numbers."""
RAMP_PARTS = 1024
"""Number of even steps in which changing shares change; one step per position in shorter legs."""
# Bounds memory, and keeps the products with `UNITS` below 2**63.
_AT_ONCE = 2**20
"""Positions that are drawn in one call."""


def shares_to_units(shares: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Convert shares to whole numbers that add up to `UNITS`.

    Each result is off by less than one: the largest remainders are rounded up. A positive share
    stays positive.

    Args:
        shares: non-negative numbers with any positive sum.
    """
    # Fractions, because sums of floats depend on the order of their terms.
    exact = [Fraction(share) for share in shares]
    divisor = math.lcm(*(share.denominator for share in exact))
    return _rounded([int(share * divisor) for share in exact])


def _rounded(parts: Sequence[int]) -> tuple[int, ...]:
    whole = sum(parts)
    units = [max(part * UNITS // whole, 1) if part else 0 for part in parts]
    missing = UNITS - sum(units)
    if missing > 0:
        remainders = [(-(part * UNITS % whole), number) for number, part in enumerate(parts)]
        for _, number in sorted(remainders)[:missing]:
            units[number] += 1
    # Tiny shares were raised to 1: the largest share pays for them.
    units[units.index(max(units))] += UNITS - sum(units)
    return tuple(units)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """Part of a mixture in which shares are constant or change evenly."""

    shares: tuple[int, ...]
    """Share of each source at the first position, in `UNITS`."""
    final_shares: tuple[int, ...] | None = None
    """Shares at the last position; None if they do not change."""
    length: int = UNITS
    """Number of positions over which the shares change."""
    stop: int | None = None
    """Offset at which the leg is cut off early. The last leg of a mixture never ends: it keeps
    its last shares."""

    def __post_init__(self) -> None:
        for shares in (self.shares, self.final_shares or self.shares):
            if sum(shares) != UNITS or min(shares) < 0 or len(shares) != len(self.shares):
                raise ValueError(f"{shares}: expected shares that add up to {UNITS}")
        if self.length < 1 or not 0 <= self.end <= self.length:
            raise ValueError(f"{self.end} of {self.length} positions")

    @property
    def end(self) -> int:
        """Number of positions in the leg, unless it is the last one."""
        return self.length if self.stop is None else self.stop

    def shares_at(self, offset: int) -> tuple[int, ...]:
        """Return the shares at an offset from the leg's first position."""
        if self.final_shares is None:
            return self.shares
        if offset >= self.length:
            return self.final_shares
        return self._in_part(self._part_at(offset))

    def parts(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield the offset and the shares of every part in which shares are constant.

        If the shares change, the last item holds the final shares, which stay.
        """
        if self.final_shares is None:
            yield 0, self.shares
            return
        for part in range(self._num_parts):
            yield -(-part * self.length // self._num_parts), self._in_part(part)
        yield self.length, self.final_shares

    @property
    def _num_parts(self) -> int:
        return min(RAMP_PARTS, self.length)

    def _part_at(self, offset: int) -> int:
        return offset * self._num_parts // self.length

    def _in_part(self, part: int) -> tuple[int, ...]:
        """Return the shares at the middle of a part."""
        assert self.final_shares is not None
        whole = 2 * self._num_parts
        return _rounded(
            [
                first * (whole - 2 * part - 1) + last * (2 * part + 1)
                for first, last in zip(self.shares, self.final_shares, strict=True)
            ]
        )


def _split_leg(leg: Leg, at: int, source: int) -> Iterator[Leg]:
    """Yield a leg up to a position, if that is not its first, and then its rest without a
    source."""
    changes = leg.final_shares is not None and at < leg.length
    # Only a last leg reaches beyond the positions in which its shares change.
    if at and leg.final_shares and not changes:
        yield replace(leg, stop=None)
        yield from _split_leg(Leg(shares=leg.final_shares), at - leg.length, source)
        return
    if at:
        yield replace(leg, stop=at, length=max(at, leg.length))
    final = _without(leg.final_shares, source) if leg.final_shares else None
    yield Leg(
        shares=_without(leg.shares_at(at), source),
        final_shares=final,
        length=max(1, leg.length - at),
        stop=None if leg.stop is None else leg.stop - at,
    )


def _without(shares: Sequence[int], source: int) -> tuple[int, ...]:
    others = [0 if number == source else share for number, share in enumerate(shares)]
    if not any(others):
        raise ValueError(f"source {source} has the only share")
    return _rounded(others)


@dataclass(frozen=True)
class DrawnSamples:
    """Samples by source: two arrays of equal length with one entry per requested position."""

    sources: Ints
    numbers: Ints
    """Index of the sample among those of its source, counted from the mixture's first position."""


@dataclass(frozen=True)
class Mixture:
    """The order of sources. The value can be sent to any process."""

    legs: tuple[Leg, ...]
    """Consecutive legs, all with the same number of sources."""

    def __post_init__(self) -> None:
        if len({len(leg.shares) for leg in self.legs}) != 1:
            raise ValueError("expected legs of equally many sources")

    @property
    def num_sources(self) -> int:
        """Number of sources, including those without a share."""
        return len(self.legs[0].shares)

    @property
    def last_shares(self) -> tuple[int, ...]:
        """Final shares of the last leg, in `UNITS`."""
        return self.legs[-1].final_shares or self.legs[-1].shares

    def shares_at(self, position: int) -> tuple[float, ...]:
        """Return the share of each source at a position."""
        offset = position
        for leg in self.legs[:-1]:
            if offset < leg.end:
                return tuple(share / UNITS for share in leg.shares_at(offset))
            offset -= leg.end
        return tuple(share / UNITS for share in self.legs[-1].shares_at(offset))

    def without(self, source: int, position: int) -> Mixture:
        """Return a mixture that omits a source from a position on.

        The other sources divide its share in proportion to theirs. Earlier positions do not change.

        Raises:
            ValueError: the source is the only one with a share.
        """
        first, legs = 0, list[Leg]()
        for leg in self.legs:
            is_last = leg is self.legs[-1]
            at = max(0, position - first)
            if at and not is_last and at >= leg.end:
                legs.append(leg)
            else:
                legs += _split_leg(leg, at, source)
            first += leg.end
        return Mixture(tuple(legs))

    def counts(self, position: int) -> tuple[int, ...]:
        """Return the number of samples of each source before a position."""
        stretch = _plan(self).stretch_at(position)
        return tuple(stretch.counts_at(position)[: self.num_sources])

    def draw(self, first: int, count: int) -> DrawnSamples:
        """Return the samples at positions first .. first + count - 1."""
        plan, parts = _plan(self), list[DrawnSamples]()
        position, stop = first, first + count
        while position < stop:
            stretch = plan.stretch_at(position)
            end = min(stop, position + _AT_ONCE, stretch.end or stop)
            parts.append(stretch.draw(position, end - position))
            position = end
        nothing = np.empty(0, np.int64)
        return DrawnSamples(
            np.concatenate([part.sources for part in parts] or [nothing]),
            np.concatenate([part.numbers for part in parts] or [nothing]),
        )

    def position_of(self, source: int, number: int, stop: int) -> int:
        """Return the first position before which a source has `number` samples.

        Return `stop` if the source has fewer samples before it.
        """
        low, high = 0, stop
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle)[source] >= number:
                high = middle
            else:
                low = middle + 1
        return low

    def largest_error(self, source: int) -> float:
        """Return a bound on the error of a source's sample count in any window.

        The error is the number of samples less the source's share of the window, and stays below
        the bound. For windows that begin at the first position the bound is half as large. If
        shares change, the result is the bound of the least favourable part.
        """
        return max(
            _error(_plan(self).tree, shares, source)
            for leg in self.legs
            for _, shares in leg.parts()
        )


@dataclass(frozen=True)
class _Tree:
    """Binary tree over the sources. Sources have the first numbers, nodes follow, and the root
    is last."""

    num_sources: int
    children: tuple[tuple[int, int], ...]
    """Left and right child of every node; both have smaller numbers than the node."""

    @property
    def root(self) -> int:
        return self.num_sources + len(self.children) - 1

    def nodes(self) -> Iterator[tuple[int, int, int]]:
        """Yield every node with its left and right child, parents before children."""
        for number in range(len(self.children) - 1, -1, -1):
            yield self.num_sources + number, *self.children[number]

    def sums(self, shares: Sequence[int]) -> list[int]:
        """Return the share of every source and node."""
        sums = list(shares)
        for left, right in self.children:
            sums.append(sums[left] + sums[right])
        return sums


def _error(tree: _Tree, shares: Sequence[int], source: int) -> float:
    """Return the sum of the source's part of each subtree that shares a parent with another one."""
    sums, node, error = tree.sums(shares), source, 0.0
    for number, children in enumerate(tree.children, start=tree.num_sources):
        if node in children:
            error += shares[source] / sums[node] if 0 < sums[node] < sums[number] else 0.0
            node = number
    return error


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Positions with constant shares, and the counts before them."""

    tree: _Tree
    first: int
    end: int | None
    """Position after the last one; None if the stretch never ends."""
    sums: tuple[int, ...]
    """Share of every source and node."""
    before: tuple[int, ...]
    """Positions of every source and node before the stretch."""
    # The remainder carries over between stretches; without it every change of shares would restart
    # the rounding and the errors would add up.
    owed: tuple[int, ...]
    """Fraction of a position that the left child of each node is owed at the start, in `UNITS`."""

    def counts_at(self, position: int) -> list[int]:
        """Return the positions of every source and node before a position."""
        here = [0] * self.tree.root + [position - self.first]
        for node, left, right in self.tree.nodes():
            here[left] = self._left(node, here[node])[0]
            here[right] = here[node] - here[left]
        return [before + more for before, more in zip(self.before, here, strict=True)]

    def _left(self, node: int, positions: int) -> tuple[int, int]:
        """Return the left child's part of a node's positions, and the remainder it is owed after
        them.

        The remainder is in shares of the node.
        """
        left, whole = self.tree.children[node - self.tree.num_sources][0], self.sums[node]
        owed = self.owed[node] * whole // UNITS
        return divmod(positions * self.sums[left] + owed, whole) if positions else (0, owed)

    def owed_at(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Return the value of `owed` for the next stretch if this one ends with these counts."""
        owed = list(self.owed)
        for node, _, _ in self.tree.nodes():
            if positions := counts[node] - self.before[node]:
                owed[node] = self._left(node, positions)[1] * UNITS // self.sums[node]
        return tuple(owed)

    def draw(self, position: int, count: int) -> DrawnSamples:
        """Return the samples at `count` positions from `position` on, all inside the stretch."""
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        counts = self.counts_at(position)
        places = {self.tree.root: np.arange(count)}
        for node, left, right in self.tree.nodes():
            owed = self._left(node, counts[node] - self.before[node])[1]
            steps = owed + self.sums[left] * np.arange(len(places[node]) + 1, dtype=np.int64)
            # A position goes left when the running quotient advances. The max(1, ...) is for nodes
            # without a share, which have no positions.
            goes_left = np.diff(steps // max(1, self.sums[node])) > 0
            places[left], places[right] = places[node][goes_left], places[node][~goes_left]
        for source in range(self.tree.num_sources):
            sources[places[source]] = source
            numbers[places[source]] = counts[source] + np.arange(len(places[source]))
        return DrawnSamples(sources, numbers)


@dataclass(frozen=True)
class _Plan:
    """A mixture as stretches of constant shares."""

    tree: _Tree
    stretches: tuple[_Stretch, ...]
    firsts: Ints

    def stretch_at(self, position: int) -> _Stretch:
        if position < 0:
            raise ValueError(f"position {position}")
        return self.stretches[int(np.searchsorted(self.firsts, position, side="right")) - 1]


# A plan of a ramp has up to 1,024 stretches, and every group of steps asks for it.
@lru_cache(maxsize=64)
def _plan(mixture: Mixture) -> _Plan:
    tree, stretches = _build_tree(mixture), list[_Stretch]()
    before, owed = (0,) * (tree.root + 1), (UNITS // 2,) * (tree.root + 1)
    parts = list(_parts(mixture))
    ends = [*(first for first, _ in parts[1:]), None]
    for (first, shares), end in zip(parts, ends, strict=True):
        stretch = _Stretch(
            tree=tree, first=first, end=end, sums=tuple(tree.sums(shares)), before=before, owed=owed
        )
        stretches.append(stretch)
        if end is not None:
            before = tuple(stretch.counts_at(end))
            owed = stretch.owed_at(before)
    return _Plan(tree, tuple(stretches), np.array([first for first, _ in parts], dtype=np.int64))


def _parts(mixture: Mixture) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the first position and the shares of each stretch."""
    first = 0
    for leg in mixture.legs:
        for offset, shares in leg.parts():
            if offset < leg.end or leg is mixture.legs[-1]:
                yield first + offset, shares
        first += leg.end


def _build_tree(mixture: Mixture) -> _Tree:
    """Build Huffman's tree of the largest shares that sources have in the first leg."""
    # Only the first leg decides, so that later legs never change earlier positions. Small shares
    # are deep in the tree, and divide the errors of all levels above among them.
    ends = [shares for shares in (mixture.legs[0].shares, mixture.legs[0].final_shares) if shares]
    heap = [(max(column), number) for number, column in enumerate(zip(*ends, strict=True))]
    heapq.heapify(heap)
    children = list[tuple[int, int]]()
    while len(heap) > 1:
        (small, right), (large, left) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (small + large, mixture.num_sources + len(children)))
        children.append((left, right))
    return _Tree(mixture.num_sources, tuple(children))


def apply_limits(
    mixture: Mixture, most: Sequence[int | None], *, since: int, samples: int
) -> Mixture:
    """Return the mixture with the shares of exhausted sources given to the others.

    Args:
        mixture: the mixture without limits.
        most: maximum number of samples of each source; None for no limit.
        since: first position that may change.
        samples: number of samples that are taken from the mixture.

    Raises:
        ValueError: all remaining sources are exhausted.
    """
    exhausted = set[int]()
    # Removing one source raises the shares of the others, so a second one may run out earlier.
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


def divide_evenly(total: int, most: Sequence[int]) -> list[int]:
    """Divide `total` samples among sources as evenly as their sizes allow.

    Args:
        total: number of samples; capped at the sum of `most`.
        most: number of samples that each source has.

    Returns:
        Samples of each source. The smallest sources are served first, and remainders go to the
        larger ones.
    """
    counts, left = [0] * len(most), min(total, sum(most))
    for rank, source in enumerate(sorted(range(len(most)), key=lambda n: (most[n], n))):
        counts[source] = min(most[source], left // (len(most) - rank))
        left -= counts[source]
    return counts


@dataclass(frozen=True, kw_only=True)
class MixedPlaces(Places):
    """Places of samples from several sources, with one entry per requested position."""

    sources: Ints


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """The orders of several sources under a mixture. Every source has its own epochs."""

    mixture: Mixture
    orders: tuple[Order, ...]
    """Order of each source."""
    firsts: tuple[int, ...]
    """Position in each source's order of the mixture's first sample of that source. Negative
    values occur only if reading starts after the mixture's first position."""

    def places(self, first: int, count: int) -> MixedPlaces:
        """Return the places of positions first .. first + count - 1 of the mixture."""
        drawn = self.mixture.draw(first, count)
        columns = np.empty((3, count), dtype=np.int64)
        for source, (order, before) in enumerate(zip(self.orders, self.firsts, strict=True)):
            inside = np.flatnonzero(drawn.sources == source)
            # The numbers of one source are consecutive, so one range per source is enough.
            if len(inside):
                places = order.places(before + int(drawn.numbers[inside[0]]), len(inside))
                columns[:, inside] = places.epochs, places.stripes, places.rows
        epochs, stripes, rows = columns
        return MixedPlaces(epochs=epochs, stripes=stripes, rows=rows, sources=drawn.sources)
