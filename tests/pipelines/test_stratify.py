"""The stored order: a permutation in which every stripe is a fair share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.hashing import mix
from elastrata_pipelines.preparation.shards import MAX_STRATA, assign_strata, compute_stored_order

lengths_of_data_sets = st.one_of(
    st.lists(st.integers(1, 40), min_size=1, max_size=400),
    st.lists(st.sampled_from([3, 64, 64, 64, 512]), min_size=1, max_size=400),
).map(lambda values: np.array(values, dtype=np.int64))
stripe_sizes = st.integers(1, 90)


def keys(count: int) -> np.ndarray:
    return mix(np.arange(count, dtype=np.uint64))


@given(lengths_of_data_sets, stripe_sizes)
def test_every_sample_is_stored_once_and_stripes_are_presorted(
    lengths: np.ndarray, stripe_size: int
) -> None:
    order = compute_stored_order(keys(len(lengths)), lengths, stripe_size)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    for first in range(0, len(order), stripe_size):
        assert np.all(np.diff(lengths[order[first : first + stripe_size]]) <= 0)


@given(lengths_of_data_sets, stripe_sizes)
def test_every_stripe_holds_its_share_of_every_stratum(
    lengths: np.ndarray, stripe_size: int
) -> None:
    order = compute_stored_order(keys(len(lengths)), lengths, stripe_size)
    bands = assign_strata(lengths)
    present = np.unique(bands)
    assert len(present) <= MAX_STRATA
    for first in range(0, len(order), stripe_size):
        stripe = bands[order[first : first + stripe_size]]
        for band in present:
            num_samples = int((bands == band).sum())
            share = num_samples * len(stripe) / len(lengths)
            bound = 1 + len(present) * num_samples / len(lengths)
            assert abs(int((stripe == band).sum()) - share) <= bound


@given(lengths_of_data_sets, stripe_sizes)
def test_the_order_does_not_depend_on_the_order_of_the_input(
    lengths: np.ndarray, stripe_size: int
) -> None:
    known = keys(len(lengths))
    shuffled = np.argsort(mix(known))
    one = known[compute_stored_order(known, lengths, stripe_size)]
    other = known[shuffled][compute_stored_order(known[shuffled], lengths[shuffled], stripe_size)]
    assert np.array_equal(one, other)
