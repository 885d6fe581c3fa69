"""The schemes that the deal is held against: each does what it says, and no row is lost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines import baselines
from elastrata_pipelines.baselines import compare
from elastrata_pipelines.deal import Ints, WorkModel

lengths_of_batches = st.lists(st.integers(1, 512), min_size=1, max_size=120).map(
    lambda values: np.array(values, dtype=np.int64)
)
ranks = st.integers(1, 40)


def _in_nodes(lengths: Ints, num_ranks: int) -> list[Ints]:
    return baselines.assign_exchanged_in_nodes(lengths, num_ranks, ranks_per_node=8)


@pytest.mark.parametrize(
    "scheme",
    [
        baselines.assign_consecutive,
        baselines.assign_stratified,
        _in_nodes,
        baselines.assign_round_robin,
        baselines.assign_alternating,
    ],
)
@given(lengths=lengths_of_batches, num_ranks=ranks)
def test_every_row_has_one_rank(
    scheme: Callable[[Ints, int], list[Ints]], lengths: Ints, num_ranks: int
) -> None:
    shares = scheme(lengths, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= (2 if scheme is _in_nodes else 1)


def test_sorted_rows_are_dealt_in_turn_or_to_and_fro() -> None:
    lengths = np.array([60, 50, 40, 30, 20, 10])
    in_turn = [share.tolist() for share in baselines.assign_round_robin(lengths, 3)]
    to_and_fro = [share.tolist() for share in baselines.assign_alternating(lengths, 3)]
    assert in_turn == [[0, 3], [1, 4], [2, 5]]
    assert to_and_fro == [[0, 5], [1, 4], [2, 3]]


@given(lengths_of_batches, ranks)
def test_a_rank_has_a_row_of_every_whole_stratum(lengths: Ints, num_ranks: int) -> None:
    descending = -np.sort(-lengths)
    for share in baselines.assign_stratified(lengths, num_ranks):
        for stratum in range(len(lengths) // num_ranks):
            band = descending[stratum * num_ranks : (stratum + 1) * num_ranks]
            assert band[-1] <= lengths[share[stratum]] <= band[0]


@given(lengths_of_batches, ranks)
def test_a_node_of_one_exchanges_nothing_and_a_node_of_all_sorts_everything(
    lengths: Ints, num_ranks: int
) -> None:
    alone = baselines.assign_exchanged_in_nodes(lengths, num_ranks, ranks_per_node=1)
    for share, stratified in zip(
        alone, baselines.assign_stratified(lengths, num_ranks), strict=True
    ):
        assert sorted(share.tolist()) == sorted(stratified.tolist())
    together = baselines.assign_exchanged_in_nodes(lengths, num_ranks, ranks_per_node=num_ranks)
    for share, dealt in zip(
        together, baselines.assign_alternating(lengths, num_ranks), strict=True
    ):
        assert lengths[share].tolist() == lengths[dealt].tolist()


@given(lengths_of_batches, st.integers(512, 700))
def test_first_fit_takes_the_longest_row_first_and_the_first_bin_with_room(
    lengths: Ints, capacity: int
) -> None:
    filled: list[int] = []
    for row in np.argsort(-lengths, kind="stable"):
        length = int(lengths[row])
        fitting = [place for place, used in enumerate(filled) if used + length <= capacity]
        expected = fitting[0] if fitting else len(filled)
        filled += [0] * (expected == len(filled))
        filled[expected] += length
    bins = baselines.pack_first_fit(lengths, capacity)
    assert np.bincount(bins, weights=lengths).tolist() == filled


def test_packed_rows_cost_what_full_ones_do() -> None:
    *_, packed = compare(
        [np.array([100, 60, 40, 30, 70, 10])],
        workers=2,
        tokens_per_micro_batch=200,
        work=WorkModel(linear=10, quadratic=1),
        seq_len=100,
        ranks_per_node=8,
    )
    assert packed.scheme == "first_fit"
    assert packed.imbalance_max_over_mean == 2 / 2
    assert packed.micro_batches == 1
    assert packed.padding_fraction == pytest.approx(1 - 310 / 400)


def test_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no batch to compare"):
        compare(
            [], workers=2, tokens_per_micro_batch=200, work=WorkModel(linear=1, quadratic=1),
            seq_len=100, ranks_per_node=8,
        )  # fmt: skip
