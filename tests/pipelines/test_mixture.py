"""The mixture: shares to the sample, a pure function of the position, at any position."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastrata_pipelines.mixture import (
    UNITS,
    Leg,
    MixedOrder,
    Mixture,
    apply_limits,
    shares_to_units,
)
from elastrata_pipelines.order import Order


def weights(least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Of so many sources, in units."""
    drawn = st.lists(st.integers(0, 1000), min_size=least, max_size=most)
    return drawn.filter(any).map(shares_to_units)


firsts = st.integers(0, 10**12) | st.integers(0, 100)


@st.composite
def legs(draw: st.DrawFn) -> tuple[Leg, ...]:
    num_sources = draw(st.integers(1, 6))
    shares = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources)
    of_leg = shares.filter(any).map(shares_to_units)
    leg = st.builds(Leg, shares=of_leg, final_shares=st.none() | of_leg, length=st.integers(1, 300))
    return tuple(draw(st.lists(leg, min_size=1, max_size=3)))


mixtures = st.builds(Mixture, legs())


def still(*shares: float) -> Mixture:
    return Mixture((Leg(shares=shares_to_units(shares)),))


@given(weights(1, 9))
def test_shares_add_up(units: tuple[int, ...]) -> None:
    assert sum(units) == UNITS
    assert min(units) >= 0


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=9).filter(any))
def test_shares_are_rounded_by_less_than_one(parts: list[int]) -> None:
    exact = [Fraction(part, sum(parts)) * UNITS for part in parts]
    assert all(abs(a - b) < 1 for a, b in zip(shares_to_units(parts), exact, strict=True))


def test_the_smallest_share_is_one() -> None:
    assert shares_to_units([1.0, 1e-30, 0.0]) == (UNITS - 1, 1, 0)


@given(mixtures, st.integers(0, 900), st.integers(0, 300), st.data())
def test_two_parts_are_one(mixture: Mixture, first: int, count: int, data: st.DataObject) -> None:
    middle = data.draw(st.integers(0, count))
    whole = mixture.draw(first, count)
    parts = [mixture.draw(first, middle), mixture.draw(first + middle, count - middle)]
    assert np.array_equal(np.concatenate([part.sources for part in parts]), whole.sources)
    assert np.array_equal(np.concatenate([part.numbers for part in parts]), whole.numbers)


@settings(max_examples=40)
@given(mixtures, st.integers(0, 900))
def test_counts_are_those_of_what_is_drawn(mixture: Mixture, position: int) -> None:
    drawn = mixture.draw(0, position)
    counted = np.bincount(drawn.sources, minlength=mixture.num_sources)
    assert mixture.counts(position) == tuple(counted.tolist())
    for source in range(mixture.num_sources):
        numbers = drawn.numbers[drawn.sources == source]
        assert np.array_equal(numbers, np.arange(counted[source]))


def errors(mixture: Mixture, shares: np.ndarray, first: int, count: int) -> np.ndarray:
    """Samples of each source less its share, after each of `count` positions from `first` on."""
    one_hot = mixture.draw(first, count).sources[:, None] == np.arange(mixture.num_sources)
    counted = np.cumsum(one_hot, axis=0) - np.cumsum(shares, axis=0)
    return np.concatenate([np.zeros((1, mixture.num_sources)), counted])


def widest(error: np.ndarray) -> np.ndarray:
    """The largest error of any window, either way: the range of the prefixes'."""
    return error.max(axis=0) - error.min(axis=0)


@given(weights(1, 9), firsts)
def test_every_window_has_its_shares(units: tuple[int, ...], first: int) -> None:
    mixture = Mixture((Leg(shares=units),))
    shares = np.tile(np.array(units) / UNITS, (400, 1))
    bounds = [mixture.largest_error(source) for source in range(len(units))]
    assert np.all(widest(errors(mixture, shares, first, 400)) <= np.array(bounds) + 1e-6)


@given(weights(2, 2), firsts)
def test_every_window_of_two_sources_is_off_by_less_than_one(
    units: tuple[int, ...], first: int
) -> None:
    shares = np.tile(np.array(units) / UNITS, (400, 1))
    mixture = Mixture((Leg(shares=units),))
    assert np.all(widest(errors(mixture, shares, first, 400)) <= 1 + 1e-6)
    assert mixture.largest_error(0) <= 1


@given(weights(3, 3), st.integers(1, 10**12))
def test_three_sources_are_off_by_less_than_one_since_the_first(
    units: tuple[int, ...], position: int
) -> None:
    mixture = Mixture((Leg(shares=units),))
    exact = [Fraction(share * position, UNITS) for share in units]
    assert all(abs(a - b) < 1 for a, b in zip(mixture.counts(position), exact, strict=True))
    assert all(mixture.largest_error(source) < 2 for source in range(3))


def test_no_order_of_three_sources_is_off_by_one_at_most_in_every_window() -> None:
    """All orders of 47, 31 and 22 percent are tried: none has more than ten positions."""
    shares = [Fraction(part, 100) for part in (47, 31, 22)]
    orders: list[list[tuple[int, ...]]] = [[(0, 0, 0)]]
    longest = 0
    while orders := [extended for order in orders for extended in _one_longer(order, shares)]:
        longest += 1
    assert longest == 10


def _one_longer(
    order: list[tuple[int, ...]], shares: list[Fraction]
) -> list[list[tuple[int, ...]]]:
    """An order, as its counts after every position, with each further source that it can have."""
    found = []
    for source in range(len(shares)):
        counts = tuple(count + (n == source) for n, count in enumerate(order[-1]))
        windows = [(len(order) - first, order[first]) for first in range(len(order))]
        if all(
            abs(counts[n] - before[n] - size * share) <= 1
            for size, before in windows
            for n, share in enumerate(shares)
        ):
            found.append([*order, counts])
    return found


@given(mixtures)
def test_changing_shares_are_followed(mixture: Mixture) -> None:
    """The errors of steps from share to share do not add up."""
    count = sum(leg.length for leg in mixture.legs) + 50
    shares = np.array([mixture.shares_at(position) for position in range(count)])
    assert np.allclose(shares.sum(axis=1), 1)
    error = errors(mixture, shares, 0, count)
    assert np.abs(error).max() <= 1.5 * max(
        1, max(map(mixture.largest_error, range(mixture.num_sources)))
    )


def test_shares_change_evenly() -> None:
    ramp = Leg(shares=shares_to_units([3, 1]), final_shares=shares_to_units([1, 3]), length=100_000)
    mixture = Mixture((ramp,))
    for position, expected in ((0, 0.75), (25_000, 0.625), (50_000, 0.5), (10**6, 0.25)):
        assert mixture.shares_at(position)[0] == pytest.approx(expected, abs=1e-3)
    assert mixture.counts(100_000) == (50_000, 50_000)
    assert mixture.counts(200_000) == (75_000, 125_000)


@given(mixtures, st.data())
def test_a_position_is_found_by_its_sample(mixture: Mixture, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, mixture.num_sources - 1))
    total = mixture.counts(700)[source]
    assume(total)
    number = data.draw(st.integers(1, total))
    position = mixture.position_of(source, number, 700)
    assert mixture.counts(position)[source] == number
    assert mixture.counts(position - 1)[source] == number - 1
    assert mixture.position_of(source, total + 1, 700) == 700


def test_seeking_is_arithmetic() -> None:
    """What is drawn far out takes as much memory as at the first position, and no replay."""
    mixture = Mixture(
        (
            Leg(shares=shares_to_units([5, 3, 2]), length=10**14),
            Leg(
                shares=shares_to_units([5, 3, 2]),
                final_shares=shares_to_units([1, 3, 6]),
                length=10**14,
            ),
        )
    )
    for first in (0, 10**13, 10**14 + 12_345, 10**15):
        peaks = []
        for _ in range(3):  # the least counts: other threads of the process are measured, too
            tracemalloc.start()
            drawn = mixture.draw(first, 1000)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert min(peaks) < 2**18
        assert np.array_equal(
            np.bincount(drawn.sources, minlength=3),
            np.subtract(mixture.counts(first + 1000), mixture.counts(first)),
        )


@given(mixtures, st.integers(0, 500), st.data())
def test_an_exhausted_source_changes_nothing_before(
    mixture: Mixture, position: int, data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, mixture.num_sources - 1))
    try:
        without = mixture.without(source, position)
    except ValueError:
        return
    before, after = mixture.draw(0, position), without.draw(0, position)
    assert np.array_equal(before.sources, after.sources)
    later = without.draw(position, 300)
    assert source not in later.sources
    shares = np.array([without.shares_at(position + n) for n in range(300)])
    assert np.allclose(shares.sum(axis=1), 1)


@given(mixtures, st.lists(st.none() | st.integers(0, 200), min_size=6, max_size=6), st.data())
def test_limits_are_kept(mixture: Mixture, most: list[int | None], data: st.DataObject) -> None:
    limits = [None, *most[1 : mixture.num_sources]]
    assume(all(shares[0] for leg in mixture.legs for _, shares in leg.parts()))
    kept = apply_limits(mixture, limits, since=0, samples=600)
    for limit, count, wish in zip(limits, kept.counts(600), mixture.counts(600), strict=True):
        assert limit is None or count <= limit
        assert count >= min(wish, count if limit is None else limit)


def test_each_source_has_its_own_epochs() -> None:
    orders = tuple(
        Order(num_samples=size, stripe_size=8, window_stripes=2, seed=3) for size in (40, 400, 13)
    )
    mixed = MixedOrder(mixture=still(0.5, 0.3, 0.2), orders=orders, firsts=(0, 7, 13))
    places = mixed.places(0, 1000)
    for source, (order, first, count) in enumerate(
        zip(orders, mixed.firsts, mixed.mixture.counts(1000), strict=True)
    ):
        inside, own = places.sources == source, order.places(first, count)
        assert np.array_equal(places.epochs[inside], own.epochs)
        assert np.array_equal(places.stripes[inside], own.stripes)
        assert np.array_equal(places.rows[inside], own.rows)


def test_golden() -> None:
    """The order of sources never changes: resumed runs rely on it."""
    ramp = Leg(
        shares=shares_to_units([5, 3, 2]), final_shares=shares_to_units([1, 3, 6]), length=20
    )
    mixture = Mixture((Leg(shares=shares_to_units([5, 3, 2]), length=20), ramp))
    assert "".join(map(str, mixture.draw(0, 60).sources)) == (
        "102010201010201020101020102102201212021221220122122122012212"
    )
