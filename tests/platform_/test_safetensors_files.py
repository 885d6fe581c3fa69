"""Weight files of others: what the format forbids is refused in a line that names the tensor, as is
all that its own library refuses; what it allows is read as it is."""

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
ONE = '"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}'


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
    "overlap": (
        _file({"a": A, "b": {**B, "data_offsets": [4, 12]}}, 12),
        "b: begins at byte 4 of the data, expected 8: it overlaps the tensor before it",
    ),
    "the same bytes": (
        _file({"a": A, "b": {**B, "data_offsets": [0, 8]}}, 8),
        "begins at byte 0 of the data, expected 8: it overlaps",
    ),
    "gap": (
        _file({"a": A, "b": {**B, "data_offsets": [12, 20]}}, 20),
        "b: begins at byte 12 of the data, expected 8: it leaves a gap before it",
    ),
    "gap at the beginning": (
        _file({"a": {**A, "data_offsets": [8, 16]}}),
        "a: begins at byte 8 of the data, expected 0: it leaves a gap",
    ),
    "empty tensor inside another": (
        _file({**PAIR, "c": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}),
        "c: begins at byte 4 of the data, expected 8: it overlaps",
    ),
    "bytes behind": (_file(PAIR, 17), "altered (17 bytes of data, expected 16)"),
    "bytes and no tensor": (_file({}, 1), "altered (1 bytes of data, expected 0)"),
    "cut short": (_file(PAIR, 15), "truncated (15 bytes of data, expected 16)"),
    "backwards": (_file({"a": {**A, "data_offsets": [8, 0]}}, 8), "a: -8 bytes are not its shape"),
    "shape of more": (_file({**PAIR, "a": {**A, "shape": [3]}}), "a: 8 bytes are not its shape's"),
    "other dtype": (_file({**PAIR, "a": {**A, "dtype": "F64"}}), "a: 8 bytes are not its shape's"),
    "int of other size": (_file({"a": {**A, "dtype": "I64"}}, 8), "a: 8 bytes are not its shape's"),
    "half bytes": (
        _file({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, 1),
        "a: 1 bytes are not its shape's",
    ),
    "no dtype": (_file({"a": {**A, "dtype": "F31"}}, 8), "a: dtype 'F31': the format has none"),
    "negative": (_file({"a": {**A, "shape": [-1, -2]}}, 8), "a: shape.0: -1: input should be"),
    "negative offset": (_file({"a": {**A, "data_offsets": [-8, 0]}}, 8), "a: data_offsets.0: -8"),
    "huge": (
        _file({"a": {"dtype": "F32", "shape": [2**61, 2**61, 0], "data_offsets": [0, 0]}}, 0),
        "larger than any file",
    ),
    "fraction": (_file({"a": {**A, "shape": [2.0]}}, 8), "a: shape.0: 2.0: input should be"),
    "one offset": (_file({"a": {**A, "data_offsets": [8]}}, 8), "a: data_offsets.1: missing"),
    "three offsets": (_file({"a": {**A, "data_offsets": [0, 8, 8]}}, 8), "a: data_offsets"),
    "no shape": (_file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8), "a: shape: missing"),
    "no entry": (_file({"a": 1}, 8), "a: expected a JSON object"),
    "metadata": (_file({"__metadata__": {"n": 1}, **PAIR}), "__metadata__: expected texts by name"),
    "metadata list": (_file({"__metadata__": ["n"], **PAIR}), "__metadata__: expected texts"),
    "a list": (_file([PAIR]), "does not begin with {"),
    "not a number": (_file(b'{"a": NaN}', 0), "NaN: not JSON"),
    "key of an entry twice": (
        _file(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], "shape": [2]}}', 8),
        "shape: given twice",
    ),
    "no UTF-8": (_file(b'{"\xff": 1}', 0), "not JSON"),
    "half a surrogate": (_file(b'{"\\ud800": 1}', 0), "no text"),
    "UTF-16": (_file("{}".encode("utf-16-le"), 0), "not JSON"),
    "more after it": (_file(b"{}{}", 0), "not JSON"),
    "header too long": (_file(PAIR, 16, 1000), "truncated, or no safetensors file"),
    "header too short": (_file(PAIR, 16, 40), "not JSON"),
    "no header": (b"\0" * 7, "truncated, or no safetensors file"),
    "empty header": (_file(b"", 0), "does not begin with {"),
    "endless header": (b"\xff" * 32, "truncated, or no safetensors file"),
}
"""What the library refuses, too."""

TWO_MEANINGS: dict[str, tuple[bytes, str]] = {
    "tensor twice": (_file(f"{{{ONE}, {ONE}}}".encode(), 8), "a: given twice"),
    "space before it": (_file(f" {{{ONE}}}".encode(), 8), "does not begin with {"),
    "key of nobody": (_file({"a": {**A, "strides": [1]}}, 8), "a: strides: unknown key"),
}
"""What the format forbids, though the library reads it."""


@pytest.mark.parametrize("case", FORBIDDEN)
def test_what_the_library_refuses_is_refused_by_name(tmp_path: Path, case: str) -> None:
    data, line = FORBIDDEN[case]
    with pytest.raises(SafetensorError):
        deserialize(data)
    (tmp_path / WEIGHTS).write_bytes(data)
    found = _refused(tmp_path)
    assert found.startswith(f"{tmp_path / WEIGHTS}: ")
    assert line in found


@pytest.mark.parametrize("case", TWO_MEANINGS)
def test_what_has_two_meanings_is_refused(tmp_path: Path, case: str) -> None:
    data, line = TWO_MEANINGS[case]
    (tmp_path / WEIGHTS).write_bytes(data)
    assert line in _refused(tmp_path)


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
        f"{tmp_path / WEIGHTS}: odd: has numbers that are {odd:g}: expected finite ones"
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
        f"{OTHER}: has no tensor a, which {INDEX} says",
    ),
    "not at all": (f'"a": "{ONE_FILE}", "b": "{OTHER}", "c": "{OTHER}"', "has no tensor c"),
    "given twice": (f'"a": "{OTHER}", {WHOLE}', "a: given twice"),
    "no such file": (f'{WHOLE}, "c": "third.safetensors"', "third.safetensors: missing"),
    "elsewhere": (f'{WHOLE}, "c": "../x.safetensors"', "no index of safetensors files"),
    "nothing": ("", "no index of safetensors files"),
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
    assert _refused(two_files).endswith(f"more, which {INDEX} knows nothing of")
    save_file({"b": torch.zeros(3), "a": torch.zeros(2)}, two_files / OTHER)
    assert _refused(two_files).endswith(f"has a tensor a, which {INDEX} has in {ONE_FILE}")
