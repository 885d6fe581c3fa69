"""Copies of a state in main memory: few, from pinned memory, shared, and right on a CPU."""

from __future__ import annotations

import pytest
import torch

from elastrata.checkpoints import staging
from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.checkpoints.staging import BUCKET_BYTES, Bucket, split_into_buckets
from support import rehearsed_copies
from support.fake_cuda import on_fake_cuda

BYTES_PER_SECOND = 20e9
"""From a GPU to pinned memory over PCIe: of gen 4's 32 GB/s what is usual."""
SECONDS_PER_COPY = 1e-4
"""To ask for one; ten times what is usual."""
STEP_SECONDS = 6 * 6.7e9 * 8192 / 500e12
"""Of 7 B parameters with 8,192 tokens a GPU, at half of an H100's peak."""


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.matrix)])
def test_a_save_is_few_copies_that_nobody_waits_for(ranks: int) -> None:
    found = on_fake_cuda(rehearsed_copies.copies_of_a_large_state, ranks, world_size=ranks)
    assert found["tensors"] == 1164
    first, second = found["saves"]
    assert first == second
    ((direction, pinned, waits, count, size),) = first
    assert (direction, pinned, waits, size) == ("to host", True, False, found["bytes"])
    assert count <= 2 * size / BUCKET_BYTES + 1
    assert found["same memory"]
    stall = count * SECONDS_PER_COPY + max(0.0, size / BYTES_PER_SECOND - STEP_SECONDS)
    assert stall <= 0.02 * CheckpointConfig().hot_every * STEP_SECONDS


def test_the_next_update_comes_after_the_copies() -> None:
    assert on_fake_cuda(rehearsed_copies.order_of_a_save_in_training) == [
        "update",
        "the copies wait for the training",
        "copies to pinned memory: True",
        "the training waits for the copies",
        "update",
        "update",
    ]


def test_tensors_of_all_kinds_share_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUCKET_BYTES", 64)
    tensors = [
        torch.tensor([True, False, True]),
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.arange(5, dtype=torch.bfloat16),
        torch.arange(40, dtype=torch.float64),
        torch.arange(3),
    ]
    buckets = split_into_buckets(tensors)
    assert sorted(number for bucket in buckets for number, _ in bucket) == list(range(7))
    assert [number for number, _ in buckets[0]] == [5]
    assert len(buckets) < 5
    for members in buckets:
        bucket = Bucket.of(members)
        bucket.copy([tensors[number] for number in bucket.members])
        for number, part in zip(bucket.members, bucket.parts, strict=True):
            assert part.dtype == tensors[number].dtype
            assert torch.equal(part, tensors[number])
