"""Weight files of others: what the format forbids is refused in a line that names the file; what it
allows is read as it is."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save, save_file
from torch import Tensor

from elastrata.checkpoints.safetensors_files import INDEX, WEIGHTS, SafetensorsFolder
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}
PAIR = {"a": A, "b": B}


def _file(header: object, num_bytes: int = 16, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(num_bytes)


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors, whole, in fp32."""
    weights, found = SafetensorsFolder(Storage(str(folder))), dict[str, Tensor]()
    for name, stored in weights.tensors.items():
        found[name] = torch.empty(stored.shape)
        weights.copy(name, tuple(slice(0, length) for length in stored.shape), found[name])
    return found


def _refused(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        _read(folder)
    return "\n".join(refused.value.problems)


FORBIDDEN: dict[str, tuple[bytes, str]] = {
    "overlap": (_file({"a": A, "b": {**B, "data_offsets": [4, 12]}}, 12), "offset"),
    "gap": (_file({"a": A, "b": {**B, "data_offsets": [12, 20]}}, 20), "offset"),
    "bytes behind": (_file(PAIR, 17), "truncated or altered"),
    "cut short": (_file(PAIR, 15), "truncated or altered"),
    "shape of more": (_file({**PAIR, "a": {**A, "shape": [3]}}), "truncated or altered"),
    "no dtype": (_file({"a": {**A, "dtype": "F31"}}, 8), "truncated or altered"),
    "no entry": (_file({"a": 1}, 8), "truncated or altered"),
    "no UTF-8": (_file(b'{"\xff": 1}', 0), "truncated or altered"),
    "header too long": (_file(PAIR, 16, 1000), "truncated, or not a safetensors file"),
    "no header": (b"\0" * 7, "truncated, or not a safetensors file"),
    "endless header": (b"\xff" * 32, "truncated, or not a safetensors file"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_what_the_library_refuses_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, line = FORBIDDEN[case]
    with pytest.raises(SafetensorError):
        deserialize(data)
    (tmp_path / WEIGHTS).write_bytes(data)
    found = _refused(tmp_path)
    assert found.startswith(f"{tmp_path / WEIGHTS}: ")
    assert line in found.lower()


def test_what_the_format_allows_is_read(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "bf16": torch.ones(3, 3, dtype=torch.bfloat16),
        "üñ\n": torch.randn(5),
    }
    (tmp_path / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
    expected = {name: tensor.float() for name, tensor in tensors.items()}
    torch.testing.assert_close(_read(tmp_path), expected, rtol=0, atol=0)
    text = json.dumps({"a": A}).encode() + b"   "  # no alignment, and spaces behind it
    (tmp_path / WEIGHTS).write_bytes(_file(text, 8))
    assert _read(tmp_path)["a"].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_named_with_their_tensor(
    tmp_path: Path, dtype: torch.dtype, odd: float
) -> None:
    values = torch.ones(40, 3, dtype=dtype)
    values[31, 1] = odd
    save_file({"fine": torch.ones(3), "odd": values}, tmp_path / WEIGHTS)
    assert _refused(tmp_path) == (
        f"{tmp_path / WEIGHTS}: odd: contains {odd:g}: expected finite numbers"
    )
    weights, target = SafetensorsFolder(Storage(str(tmp_path))), torch.empty(10, 3)
    weights.copy("odd", (slice(0, 10), slice(0, 3)), target)  # the rows that a rank needs
    assert torch.equal(target, torch.ones(10, 3))


def _index(folder: Path, map_text: str) -> None:
    (folder / INDEX).write_text(
        f'{{"metadata": {{}}, "weight_map": {{{map_text}}}}}', encoding="utf-8"
    )


ONE_FILE, OTHER = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WHOLE = f'"a": "{ONE_FILE}", "b": "{OTHER}"'
DISAGREEMENTS: dict[str, tuple[str, str]] = {
    "wrong file": (
        f'"a": "{OTHER}", "b": "{ONE_FILE}"',
        f"{OTHER}: has no tensor a, which {INDEX} lists",
    ),
    "not at all": (f'"a": "{ONE_FILE}", "b": "{OTHER}", "c": "{OTHER}"', "has no tensor c"),
    "no such file": (f'{WHOLE}, "c": "third.safetensors"', "third.safetensors: missing"),
    "elsewhere": (f'{WHOLE}, "c": "../x.safetensors"', "not an index of safetensors files"),
    "nothing": ("", "not an index of safetensors files"),
}


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    save_file({"a": torch.ones(2)}, tmp_path / ONE_FILE)
    save_file({"b": torch.zeros(3)}, tmp_path / OTHER)
    return tmp_path


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_an_index_that_is_of_other_files_is_refused(two_files: Path, case: str) -> None:
    map_text, line = DISAGREEMENTS[case]
    _index(two_files, map_text)
    assert line in _refused(two_files)


def test_a_tensor_that_the_index_does_not_know_is_named(two_files: Path) -> None:
    _index(two_files, WHOLE)
    assert _read(two_files).keys() == {"a", "b"}
    save_file({"b": torch.zeros(3), "more": torch.zeros(1)}, two_files / OTHER)
    assert _refused(two_files).endswith(f"more, which {INDEX} does not list")
    save_file({"b": torch.zeros(3), "a": torch.zeros(2)}, two_files / OTHER)
    assert _refused(two_files).endswith(f"has a tensor a, which {INDEX} lists in {ONE_FILE}")
