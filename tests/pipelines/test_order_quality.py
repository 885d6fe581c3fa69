"""The order beside an ideal shuffle, from ten samples to a billion; what is none is found out."""

from __future__ import annotations

import numpy as np
import pytest

from elastrata_pipelines.hashing import key, mix
from elastrata_pipelines.mixture import Leg, Mixture, shares_to_units
from elastrata_pipelines.order import Order
from support import order_quality

WORST = 4.0
"""Standard deviations: beyond are six of 100,000 ideal shuffles."""


def order(size: int) -> Order:
    stripe = 16 if size < 10_000 else 1024 if size < 10**8 else 8192
    return Order(num_samples=size, stripe_size=stripe, window_stripes=8, seed=1)


@pytest.mark.parametrize("size", [10, 1000, 10**6, 10**9])
def test_an_order_is_as_good_as_an_ideal_shuffle(size: int) -> None:
    quality = order_quality.measure(order(size), draws=1000 if size < 10**8 else 300)
    assert quality.draws > 250
    assert quality.worst < WORST, quality


@pytest.mark.parametrize("size", [10, 1000, 20_000])
def test_positions_are_the_inverse_of_places(size: int) -> None:
    one = order(size)
    places = one.places(size, min(size, 300))
    stored = places.stripes * one.stripe_size + places.rows
    assert np.array_equal(order_quality.positions_of(one, stored, epoch=1), np.arange(len(stored)))


def test_what_is_not_shuffled_is_found_out() -> None:
    stored = np.arange(1000)
    positions = order_quality.chi_square(stored / 1000, stored / 1000, 1000)
    assert positions > 100 * WORST
    slow = mix(stored // 4) / 2.0**64  # every fourth sample begins a document
    assert order_quality.chi_square(slow[:-1], slow[1:], 1000) > WORST


@pytest.mark.parametrize("weights", [(1, 1), (47, 31, 22), (60, 25, 10, 5), (1, 10, 100, 1000)])
def test_shares_of_any_window_up_to_a_billion(weights: tuple[int, ...]) -> None:
    mixture = Mixture((Leg(shares=shares_to_units(weights)),))
    bound = max(map(mixture.largest_error, range(len(weights))))
    assert bound <= 2
    for window in (1, 10, 1000, 10**6, 10**9):
        firsts = [int(one) % 10**9 for one in mix([key(window, n) for n in range(50)])]
        assert order_quality.share_error(mixture, window, firsts) <= bound + 1e-6 + window / 2**31
