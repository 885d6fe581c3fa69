"""A step on a GPU, rehearsed: the host waits for the device once, and copies wait for nobody."""

from __future__ import annotations

import pytest

from support import rehearsed_steps
from support.fake_cuda import apart, on_fake_cuda

SMALL = [
    *("workload.hidden_size=32", "workload.num_layers=2", "workload.num_heads=4"),
    *("batch_size=8", "micro_batch_tokens=512"),
]


MATRIX = pytest.mark.matrix
DIVIDED = ["workers.min=8", "workers.max=8"]
WAYS = {
    "plain": ("gpt/tiny", [], True),
    "sparse": ("gpt/tiny", ["sparsity.level=0.5"], True),
    "tensor": ("gpt/tiny", ["parallel.tensor=2", *DIVIDED], True),
    "pipeline": ("gpt/tiny", ["parallel.pipeline=2", *DIVIDED], True),
}
MORE_WAYS = {
    "bucketwise": ("bert/tiny", ["clip.method=bucketwise"], True),
    "muon": ("gpt/tiny", ["optimizer.name=muon"], False),
    "lamb": ("gpt/tiny", ["optimizer.name=lamb"], False),
    "virtual ranks": (
        "gpt/tiny",
        ["parallel.virtual_ranks=8", "optimizer.fused=false", "workers.threads=1"],
        False,
    ),
}


@pytest.mark.parametrize(
    ("name", "overrides", "skips"),
    [
        *(pytest.param(*way, id=name) for name, way in WAYS.items()),
        *(pytest.param(*way, id=name, marks=MATRIX) for name, way in MORE_WAYS.items()),
    ],
)
def test_the_host_waits_once_a_step(name: str, overrides: list[str], skips: bool) -> None:
    waits, copies, on_device = on_fake_cuda(
        rehearsed_steps.entries_of_a_step, name, [*SMALL, *overrides]
    )
    assert [(reason, count) for reason, _, count in waits] == [("Event.synchronize", 1)], waits
    assert not [copy for copy in copies if copy[1]], copies
    assert {direction for direction, *_ in copies} == {"to host", "to device"}
    assert on_device == skips


@pytest.mark.matrix
def test_an_update_of_masks_asks_whether_all_is_finite_and_counts_zeros() -> None:
    rigl = ["sparsity.method=rigl", "sparsity.level=0.5", "sparsity.schedule.every=3"]
    waits, copies, _ = on_fake_cuda(rehearsed_steps.entries_of_a_step, "gpt/tiny", [*SMALL, *rigl])
    assert sorted((reason, line.rpartition(" ")[2]) for reason, line, _ in waits) == [
        ("Event.synchronize", "wait"),
        ("item", "all_finite"),
        ("item", "before_clip"),
        ("item", "counts_over_shards"),
    ]
    assert not [copy for copy in copies if copy[1]], copies


def test_the_peak_of_training_leaves_out_what_was_there_before() -> None:
    before, steps = apart(rehearsed_steps.peaks_before_and_in_training)
    assert before == 2**33
    assert 0 < steps < 2**33
