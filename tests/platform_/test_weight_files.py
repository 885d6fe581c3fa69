"""Weights in files: of one kind of number, cut where they are too large, and a few in memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from elastrata.workload.hf_folder import (
    INDEX,
    WeightForm,
    weight_form,
    write_weights,
)
from elastrata_pipelines.errors import UserError

SIZES = (3, 5, 2, 40, 1, 1, 4)


def _weights() -> Iterator[tuple[str, Tensor]]:
    for number, size in enumerate(SIZES):
        yield f"w{number}", torch.full((size, 10), float(number))


def test_files_are_as_large_as_they_may_be_and_named_in_the_index(tmp_path: Path) -> None:
    form = WeightForm(dtype=torch.bfloat16, shard_bytes=200)
    write_weights(tmp_path, _weights(), form)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    numbers = 10 * sum(SIZES)
    assert index["metadata"] == {"total_parameters": numbers, "total_size": 2 * numbers}
    files = {name: load_file(tmp_path / name) for name in sorted({*index["weight_map"].values()})}
    assert list(files) == [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [list(found) for found in files.values()] == [
        ["w0", "w1", "w2"],
        ["w3"],  # larger than a file may be
        ["w4", "w5", "w6"],
    ]
    whole = {name: value for found in files.values() for name, value in found.items()}
    assert {value.dtype for value in whole.values()} == {torch.bfloat16}
    torch.testing.assert_close(
        {name: value.float() for name, value in whole.items()}, dict(_weights())
    )
    assert {name: file for file, found in files.items() for name in found} == index["weight_map"]


def test_no_more_is_held_than_a_file_and_a_tensor(tmp_path: Path) -> None:
    alive, most = 0, 0

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    def weights() -> Iterator[tuple[str, Tensor]]:
        nonlocal alive, most
        for number in range(50):
            numbers = np.zeros(100, np.float32)  # what a tensor of it keeps alive, and its views
            alive += numbers.nbytes
            most = max(most, alive)
            weakref.finalize(numbers, gone, numbers.nbytes)
            tensor = torch.from_numpy(numbers)
            del numbers
            yield f"w{number}", tensor
            del tensor

    write_weights(tmp_path, weights(), WeightForm(shard_bytes=2000))
    assert len(list(tmp_path.glob("*.safetensors"))) == 10
    assert 2000 <= most <= 2000 + 2 * 400


def test_forms_that_cannot_be_are_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        weight_form("bf61", "5")
    assert caught.value.problems == (
        "--dtype: bf61: expected fp32, bf16, fp16 (did you mean 'bf16'?)",
        "--shard-size: 5: expected a number above 0 with one of the units KB, MB, GB, TB, MiB, "
        "GiB, such as 5GB",
    )
    for wrong in ("0GB", "-1GB", "5gb", "GB", "0.0000000001KB", "1e3GB"):
        with pytest.raises(UserError, match="--shard-size"):
            weight_form("fp32", wrong)
