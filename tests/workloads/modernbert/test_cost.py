"""FLOPs and work of windows, counted pair by pair; and the numbers of a block."""

from __future__ import annotations

import numpy as np
import pytest

from elastrata_pipelines.deal import count_pairs_within


@pytest.mark.parametrize("window", [0, 1, 4, 64])
def test_pairs_are_those_that_are_counted(window: int) -> None:
    lengths = np.array([0, 1, 2, window, window + 1, window + 2, 100])
    places = [np.arange(length) for length in lengths]
    counted = [int((abs(p[:, None] - p) <= window).sum()) for p in places]
    assert count_pairs_within(lengths, window).tolist() == counted


def test_flops_are_those_of_the_matrices_and_of_the_pairs(make_modernbert, vocabulary) -> None:
    workload, lengths = make_modernbert(intermediate_size=48), [70, 9, 3]
    h, layers, ids = 32, 4, vocabulary.size
    matrices = layers * (4 * h * h + 3 * h * 48)
    pairs = sum(int(count_pairs_within(np.array(length), 4)) for length in lengths)
    squares = sum(length**2 for length in lengths)
    products = matrices * sum(lengths) + 2 * h * (2 * squares + 2 * pairs) + 20 * h * (h + ids)
    assert workload.flops(lengths, {"mlm": 20.0}, vocabulary) == 6 * products


def test_work_is_the_forward_part_of_flops(make_modernbert, vocabulary) -> None:
    workload = make_modernbert()
    work = workload.work(vocabulary)
    for length in (20, 40, 200):
        predicted = {"mlm": 0.3 * length}
        assert int(work(length)) == pytest.approx(
            workload.flops([length], predicted, vocabulary) / 3, rel=1e-3
        )


def test_stages_cost_what_their_layers_see(make_modernbert, vocabulary) -> None:
    costs = make_modernbert().block_costs(vocabulary, 100)
    assert costs[1] == costs[2] < costs[0]


def test_every_number_of_a_block_is_counted(make_modernbert, vocabulary) -> None:
    workload = make_modernbert()
    block = workload.build_model(vocabulary, 64).blocks[1]
    counted = sum(parameter.numel() for parameter in block.parameters())
    assert workload.model_spec(vocabulary, 64).block_parameters == counted
