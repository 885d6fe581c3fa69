"""Fake CUDA: what a GPU would be asked for is entered in the ledger, with the line that asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrata.rehearsal import process
from elastrata_pipelines.errors import UserError
from support import rehearsed
from support.fake_cuda import on_fake_cuda


def test_waits_for_the_device_are_entered_with_their_line() -> None:
    waits = on_fake_cuda(rehearsed.waits_of_a_few_lines)
    assert waits == [
        (reason, "waits_of_a_few_lines", 1)
        for reason in (
            *("item", "item", "copy to host", "copy to device"),
            *("shape", "synchronize", "Event.synchronize"),
        )
    ]


def test_numbers_are_those_of_the_host_as_far_as_the_device_has_not_changed_them() -> None:
    assert on_fake_cuda(rehearsed.numbers_that_are_read) == [[3.0, 4.0], [1.0, 1.0], 1.0, 5]


def test_messages_are_entered_by_the_axis_of_their_mesh() -> None:
    found = on_fake_cuda(rehearsed.messages_on_a_mesh)
    assert found["messages"] == [
        ("allreduce", "replicate", 4, "bfloat16", 1, 16),
        ("reduce_scatter_base", "shard", 2, "bfloat16", 1, 16),
        ("allreduce", "world", 8, "bfloat16", 1, 16),
    ]
    assert found["objects"] == ["mine"] * 8
    assert found["gloo groups"] == 1


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs g\+\+ or clang\+\+"):
        process.shim_library(process._torch_folder())


def test_own_time_is_that_of_the_step_before_and_waits_for_nothing() -> None:
    """By two events around each pass of one block, in training alone."""
    told, waits = on_fake_cuda(rehearsed.own_time_of_steps)
    assert told == [(0.0, 0.0), (1.0, 10.0), (2.0, 20.0)]
    assert waits == 0
