"""The order: an epoch is a partition, and a batch does not depend on where one starts reading."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.order import Order

orders = st.builds(
    Order,
    num_samples=st.integers(1, 400),
    stripe_size=st.integers(1, 50),
    window_stripes=st.integers(1, 9),
    seed=st.integers(-5, 2**63),
)


def stored(order: Order, first: int, count: int) -> np.ndarray:
    places = order.places(first, count)
    return places.stripes * order.stripe_size + places.rows


@given(orders, st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(order: Order, epoch: int) -> None:
    places = order.places(epoch * order.num_samples, order.num_samples)
    samples = places.stripes * order.stripe_size + places.rows
    assert sorted(samples.tolist()) == list(range(order.num_samples))
    assert set(places.epochs.tolist()) == {epoch}


@given(orders, st.integers(0, 900), st.integers(0, 300), st.data())
def test_reading_in_two_parts_is_reading_in_one(
    order: Order, first: int, count: int, data: st.DataObject
) -> None:
    middle = data.draw(st.integers(0, count))
    parts = [stored(order, first, middle), stored(order, first + middle, count - middle)]
    assert np.array_equal(np.concatenate(parts), stored(order, first, count))


@given(orders, st.integers(0, 2))
def test_a_window_reads_few_stripes(order: Order, epoch: int) -> None:
    """Consecutive samples come from the stripes of a window, whole windows one after the other."""
    places = order.places(epoch * order.num_samples, order.num_samples)
    first, seen = 0, set[int]()
    while first < order.num_samples:
        inside = set(places.stripes[first:].tolist())
        window = set[int]()
        size = 0
        while first + size < order.num_samples and (
            int(places.stripes[first + size]) in window or len(window) < order.window_stripes
        ):
            window.add(int(places.stripes[first + size]))
            size += 1
        assert not window & seen
        assert window <= inside
        seen |= window
        first += size


def test_epochs_and_seeds_differ() -> None:
    order = Order(num_samples=1000, stripe_size=10, window_stripes=4, seed=1)
    other = Order(num_samples=1000, stripe_size=10, window_stripes=4, seed=2)
    assert not np.array_equal(stored(order, 0, 1000), stored(order, 1000, 1000))
    assert not np.array_equal(stored(order, 0, 1000), stored(other, 0, 1000))


def test_golden() -> None:
    """The order of a data set never changes: resumed runs rely on it."""
    order = Order(num_samples=20, stripe_size=4, window_stripes=2, seed=7)
    assert stored(order, 0, 20).tolist() == [
        9, 11, 15, 13, 10, 14, 12, 8, 17, 4, 19, 5, 16, 18, 7, 6, 1, 2, 0, 3,
    ]  # fmt: skip
