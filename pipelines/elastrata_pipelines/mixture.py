"""The mixture: which source stands at which position, and which of its samples. Numbers in, numbers
out.

The sources are the leaves of a binary tree. Every node shares its positions out between its two
sides as evenly as whole numbers can: of its first m positions floor(m * left / whole + 1/2) go to
the left (a Sturmian word; Morse and Hedlund, Amer. J. Math. 62, 1940). Nothing is drawn, so a count
is arithmetic at any position.

Of two sources, every window of k positions has k times their share, to less than one sample. No
order does that for three or more, but for a few special shares (Tijdeman, Indag. Math. 83, 1980;
Fraenkel's conjecture): of three, windows are off by less than two, and the first k positions, for
any k, by less than one. `Mixture.largest_error` gives the bound for any shares.
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
"""Shares are whole numbers that add up to this."""
RAMP_PARTS = 1024
"""Shares that change do so in so many even steps, or one a position where there are fewer."""
_AT_ONCE = 2**20
"""Positions: with `UNITS`, their products fit 64 bits."""


def in_units(shares: Sequence[float | Fraction]) -> tuple[int, ...]:
    """Shares as whole numbers that add up to `UNITS`, each off by less than one: the largest
    remainders are rounded up. A share above 0 stays above 0.

    Args:
        shares: none below 0, some above it; of any sum.
    """
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
    units[units.index(max(units))] += UNITS - sum(units)
    return tuple(units)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of a mixture: shares that stay as they are, or change evenly."""

    shares: tuple[int, ...]
    """Of each source, in `UNITS`, at its first position."""
    final_shares: tuple[int, ...] | None = None
    """At its last one; None: the same."""
    length: int = UNITS
    """Positions in which they change."""
    stop: int | None = None
    """The position, counted from its first, at which it ends before that. The last leg of a mixture
    never ends, and goes on with its last shares."""

    def __post_init__(self) -> None:
        for shares in (self.shares, self.final_shares or self.shares):
            if sum(shares) != UNITS or min(shares) < 0 or len(shares) != len(self.shares):
                raise ValueError(f"{shares}: expected shares that add up to {UNITS}")
        if self.length < 1 or not 0 <= self.end <= self.length:
            raise ValueError(f"{self.end} of {self.length} positions")

    @property
    def end(self) -> int:
        """Its positions, but for the last leg."""
        return self.length if self.stop is None else self.stop

    def shares_at(self, offset: int) -> tuple[int, ...]:
        """The shares at a position of the leg, counted from its first."""
        if self.final_shares is None:
            return self.shares
        if offset >= self.length:
            return self.final_shares
        return self._in_part(self._part_at(offset))

    def parts(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Its first position, counted from the leg's, and the shares of every part of equal ones;
        after the last, where it changes, the shares that stay."""
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
        """The shares half way through one of the parts."""
        assert self.final_shares is not None
        whole = 2 * self._num_parts
        return _rounded(
            [
                first * (whole - 2 * part - 1) + last * (2 * part + 1)
                for first, last in zip(self.shares, self.final_shares, strict=True)
            ]
        )


def _cut(leg: Leg, at: int, source: int) -> Iterator[Leg]:
    """A leg up to a position, where that is not its first, and its rest without a source."""
    changes = leg.final_shares is not None and at < leg.length
    if at and leg.final_shares and not changes:  # the rest of a last leg
        yield replace(leg, stop=None)
        yield from _cut(Leg(shares=leg.final_shares), at - leg.length, source)
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
class Drawn:
    """Samples by their source: two arrays of equal length, one entry per position asked for."""

    sources: Ints
    numbers: Ints
    """The sample's number among those of its source, counted from the mixture's first position."""


@dataclass(frozen=True)
class Mixture:
    """The order of sources. A value: it can be sent to any process."""

    legs: tuple[Leg, ...]
    """One after the other, of equally many sources."""

    def __post_init__(self) -> None:
        if len({len(leg.shares) for leg in self.legs}) != 1:
            raise ValueError("expected legs of equally many sources")

    @property
    def num_sources(self) -> int:
        """Sources, those without a share included."""
        return len(self.legs[0].shares)

    @property
    def last_shares(self) -> tuple[int, ...]:
        """Those that stay, in `UNITS`."""
        return self.legs[-1].final_shares or self.legs[-1].shares

    def shares_at(self, position: int) -> tuple[float, ...]:
        """The share of each source at a position."""
        offset = position
        for leg in self.legs[:-1]:
            if offset < leg.end:
                return tuple(share / UNITS for share in leg.shares_at(offset))
            offset -= leg.end
        return tuple(share / UNITS for share in self.legs[-1].shares_at(offset))

    def without(self, source: int, position: int) -> Mixture:
        """The same up to a position; from there on the others have that source's share, in
        proportion to theirs.

        Raises:
            ValueError: there is no other one.
        """
        first, legs = 0, list[Leg]()
        for leg in self.legs:
            is_last = leg is self.legs[-1]
            at = max(0, position - first)
            if at and not is_last and at >= leg.end:
                legs.append(leg)
            else:
                legs += _cut(leg, at, source)
            first += leg.end
        return Mixture(tuple(legs))

    def counts(self, position: int) -> tuple[int, ...]:
        """Samples of each source before a position."""
        stretch = _plan(self).stretch_at(position)
        return tuple(stretch.counts_at(position)[: self.num_sources])

    def draw(self, first: int, count: int) -> Drawn:
        """The samples at positions first .. first + count - 1."""
        plan, parts = _plan(self), list[Drawn]()
        position, stop = first, first + count
        while position < stop:
            stretch = plan.stretch_at(position)
            end = min(stop, position + _AT_ONCE, stretch.end or stop)
            parts.append(stretch.draw(position, end - position))
            position = end
        nothing = np.empty(0, np.int64)
        return Drawn(
            np.concatenate([part.sources for part in parts] or [nothing]),
            np.concatenate([part.numbers for part in parts] or [nothing]),
        )

    def position_of(self, source: int, number: int, stop: int) -> int:
        """The first position before which there are so many samples of a source; `stop` where
        there are fewer before it."""
        low, high = 0, stop
        while low < high:
            middle = (low + high) // 2
            if self.counts(middle)[source] >= number:
                high = middle
            else:
                low = middle + 1
        return low

    def largest_error(self, source: int) -> float:
        """A bound that the samples of a source in any window, less its share of them, stay below.
        Of the positions from the first on it is half that.

        For shares that change it is that of the least favourable part, on either side.
        """
        return max(
            _error(_plan(self).tree, shares, source)
            for leg in self.legs
            for _, shares in leg.parts()
        )


@dataclass(frozen=True)
class _Tree:
    """Sources have the numbers from 0 on, nodes those after them; the last one is the root."""

    num_sources: int
    children: tuple[tuple[int, int], ...]
    """Left and right of every node; both have smaller numbers."""

    @property
    def root(self) -> int:
        return self.num_sources + len(self.children) - 1

    def nodes(self) -> Iterator[tuple[int, int, int]]:
        """Every node with its left and its right, those above before those below."""
        for number in range(len(self.children) - 1, -1, -1):
            yield self.num_sources + number, *self.children[number]

    def sums(self, shares: Sequence[int]) -> list[int]:
        """The share of every source and node."""
        sums = list(shares)
        for left, right in self.children:
            sums.append(sums[left] + sums[right])
        return sums


def _error(tree: _Tree, shares: Sequence[int], source: int) -> float:
    """The sum of a source's part of each side on its way that shares a node with another."""
    sums, side, error = tree.sums(shares), source, 0.0
    for number, children in enumerate(tree.children, start=tree.num_sources):
        if side in children:
            error += shares[source] / sums[side] if 0 < sums[side] < sums[number] else 0.0
            side = number
    return error


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Positions of equal shares, and what was counted before them."""

    tree: _Tree
    first: int
    end: int | None
    """None: it goes on for ever."""
    sums: tuple[int, ...]
    """The share of every source and node."""
    before: tuple[int, ...]
    """Positions of each before it."""
    owed: tuple[int, ...]
    """What the left side of each is owed when it begins: part of a position, in `UNITS`."""

    def counts_at(self, position: int) -> list[int]:
        """Positions of every source and node before a position."""
        here = [0] * self.tree.root + [position - self.first]
        for node, left, right in self.tree.nodes():
            here[left] = self._left(node, here[node])[0]
            here[right] = here[node] - here[left]
        return [before + more for before, more in zip(self.before, here, strict=True)]

    def _left(self, node: int, positions: int) -> tuple[int, int]:
        """The left side's part of so many positions of a node, and what it is owed after them, in
        shares of the node."""
        left, whole = self.tree.children[node - self.tree.num_sources][0], self.sums[node]
        owed = self.owed[node] * whole // UNITS
        return divmod(positions * self.sums[left] + owed, whole) if positions else (0, owed)

    def owed_at(self, counts: Sequence[int]) -> tuple[int, ...]:
        """As `owed`, where it ends with these counts."""
        owed = list(self.owed)
        for node, _, _ in self.tree.nodes():
            if positions := counts[node] - self.before[node]:
                owed[node] = self._left(node, positions)[1] * UNITS // self.sums[node]
        return tuple(owed)

    def draw(self, position: int, count: int) -> Drawn:
        """The samples at so many positions from one on, all of them inside."""
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        counts = self.counts_at(position)
        places = {self.tree.root: np.arange(count)}
        for node, left, right in self.tree.nodes():
            owed = self._left(node, counts[node] - self.before[node])[1]
            steps = owed + self.sums[left] * np.arange(len(places[node]) + 1, dtype=np.int64)
            goes_left = np.diff(steps // max(1, self.sums[node])) > 0
            places[left], places[right] = places[node][goes_left], places[node][~goes_left]
        for source in range(self.tree.num_sources):
            sources[places[source]] = source
            numbers[places[source]] = counts[source] + np.arange(len(places[source]))
        return Drawn(sources, numbers)


@dataclass(frozen=True)
class _Plan:
    """A mixture as stretches of equal shares."""

    tree: _Tree
    stretches: tuple[_Stretch, ...]
    firsts: Ints

    def stretch_at(self, position: int) -> _Stretch:
        if position < 0:
            raise ValueError(f"position {position}")
        return self.stretches[int(np.searchsorted(self.firsts, position, side="right")) - 1]


@lru_cache(maxsize=64)
def _plan(mixture: Mixture) -> _Plan:
    tree, stretches = _tree(mixture), list[_Stretch]()
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
    """First position and shares of each stretch."""
    first = 0
    for leg in mixture.legs:
        for offset, shares in leg.parts():
            if offset < leg.end or leg is mixture.legs[-1]:
                yield first + offset, shares
        first += leg.end


def _tree(mixture: Mixture) -> _Tree:
    """Huffman's tree of the largest shares that sources have in the first leg, so that no later one
    changes what is before it: small ones are deep, where all errors above are shared out."""
    ends = [shares for shares in (mixture.legs[0].shares, mixture.legs[0].final_shares) if shares]
    heap = [(max(column), number) for number, column in enumerate(zip(*ends, strict=True))]
    heapq.heapify(heap)
    children = list[tuple[int, int]]()
    while len(heap) > 1:
        (small, right), (large, left) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (small + large, mixture.num_sources + len(children)))
        children.append((left, right))
    return _Tree(mixture.num_sources, tuple(children))


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


@dataclass(frozen=True, kw_only=True)
class MixedPlaces(Places):
    """Where samples of several sources are stored, one entry per position asked for."""

    sources: Ints


@dataclass(frozen=True, kw_only=True)
class MixedOrder:
    """The orders of several sources under a mixture. Every source has its own epochs."""

    mixture: Mixture
    orders: tuple[Order, ...]
    """That of each source."""
    firsts: tuple[int, ...]
    """The position in each source's order of the mixture's first sample of it; below 0 where the
    mixture is gone into behind its first position only."""

    def places(self, first: int, count: int) -> MixedPlaces:
        """The samples at positions first .. first + count - 1 of the mixture."""
        drawn = self.mixture.draw(first, count)
        columns = np.empty((3, count), dtype=np.int64)
        for source, (order, before) in enumerate(zip(self.orders, self.firsts, strict=True)):
            inside = np.flatnonzero(drawn.sources == source)
            if len(inside):  # numbers of one source follow on one another
                places = order.places(before + int(drawn.numbers[inside[0]]), len(inside))
                columns[:, inside] = places.epochs, places.stripes, places.rows
        epochs, stripes, rows = columns
        return MixedPlaces(epochs=epochs, stripes=stripes, rows=rows, sources=drawn.sources)
