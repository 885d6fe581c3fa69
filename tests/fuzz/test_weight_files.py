"""Forged weight files: each is refused in lines that name the file, or read exactly as the library
of their format reads it; and whatever that library refuses is refused."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from elastrata.checkpoints.safetensors_files import INDEX, WEIGHTS, SafetensorsFolder
from elastrata_pipelines.storage import Storage
from support.mutations import (
    ROUNDS_VARIABLE,
    Mutation,
    mutated,
    mutated_bytes,
    mutated_json,
    mutations,
)
from support.verdict import read_or_refused

CASES = 50
CHUNKS = int(os.environ.get(ROUNDS_VARIABLE, "2"))
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DTYPES = ("F32", "BF16", "F16", "F64", "I64", "U8", "F4", "BOOL", "F8_E4M3", "F31", "")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A folder with one file, and one with two and their index."""
    rng = torch.Generator().manual_seed(0)
    sizes = {"a": (4, 3), "b": (7,), "c": (), "d": (0, 2), "e": (2, 2, 3)}
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in sizes.items()}
    tensors["b"], tensors["e"] = tensors["b"].bfloat16(), tensors["e"].half()
    one, two = (tmp_path_factory.mktemp(name) / "model" for name in ("one", "two"))
    one.mkdir()
    two.mkdir()
    save_file(tensors, one / WEIGHTS, {"format": "pt"})
    parts = {FIRST: ("a", "b"), SECOND: ("c", "d", "e")}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, two / file, {"format": "pt"})
    weight_map = {name: file for file, names in parts.items() for name in names}
    (two / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 86}, "weight_map": weight_map}), encoding="utf-8"
    )
    return [one, two]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_forged_weight_file_is_refused_or_read_as_its_library_does(
    folders: list[Path], chunk: int
) -> None:
    rng = random.Random(chunk)
    refused = read = 0
    for folder in folders:
        for mutation in islice(_mutations(folder, rng), CASES // 2):
            with mutated(folder, mutation) as copy:
                case = f"seed {chunk}: {folder.parent.name}: {mutation.name}"
                found = read_or_refused(partial(_ours, copy), case, str(copy))
                if found is None:
                    refused += 1
                else:
                    _check_same(found, _theirs(copy, case), case)
                    read += 1
    assert refused > CASES // 3
    assert read


def _ours(folder: Path) -> dict[str, Tensor]:
    weights, found = SafetensorsFolder(Storage(str(folder))), dict[str, Tensor]()
    for name, stored in weights.tensors.items():
        if stored.dtype in ("F32", "BF16", "F16"):  # others are refused by who asks for them
            found[name] = torch.empty(stored.shape)
            weights.copy(name, tuple(slice(0, length) for length in stored.shape), found[name])
    return found


def _theirs(folder: Path, case: str) -> dict[str, Tensor]:
    """All tensors, as the library reads every file; it must not refuse one."""
    found: dict[str, Tensor] = {}
    for path in SafetensorsFolder(Storage(str(folder))).files:
        try:
            tensors = load_file(folder / path)
        except Exception as error:
            raise AssertionError(f"{case}: read, though the library refuses it: {error}") from error
        assert not found.keys() & tensors.keys(), f"{case}: two files have the same tensor"
        found |= tensors
    return found


def _check_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], case: str) -> None:
    for name, tensor in theirs.items():
        if tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(ours[name], tensor.float()), f"{case}: {name}"
            assert tensor.isfinite().all(), f"{case}: {name}"


def _mutations(folder: Path, rng: random.Random) -> Iterator[Mutation]:
    """Of the tree, of bytes, of JSON, of headers, and of the values in headers."""
    general = mutations(folder, rng)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    while True:
        kind = rng.choice(("any", "header", "entry", "entry", "numbers"))
        if kind == "any":
            yield next(general)
            continue
        file = rng.choice(files)
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, body = data[8 : 8 + length], data[8 + length :]
        if kind == "header":
            altered = rng.choice((mutated_json, mutated_bytes))(header, rng)
            if altered is None:
                continue
            name, header = altered
        elif kind == "entry":
            name, header, body = _forged(header, body, rng)
        else:
            name, body = _odd_numbers(body, rng)
        whole = len(header).to_bytes(8, "little") + header + body
        yield Mutation(f"{file}: {kind}: {name}", partial(_put, file=file, data=whole))


def _put(copy: Path, *, file: str, data: bytes) -> None:
    (copy / file).write_bytes(data)


def _odd_numbers(body: bytes, rng: random.Random) -> tuple[str, bytes]:
    """NaN and infinity in either of the types that have two bytes at their end."""
    odd = rng.choice((b"\xc0\x7f", b"\x80\x7f", b"\x80\xff", b"\x00\x7c", b"\x01\xfc"))
    at = 2 * rng.randrange(len(body) // 2) if len(body) > 1 else 0
    return f"{odd.hex()} at {at}", body[:at] + odd + body[at + 2 :] if body else b""


def _forged(header: bytes, body: bytes, rng: random.Random) -> tuple[str, bytes, bytes]:
    """A header that says something else, in JSON that is sound; the tensors' bytes with it."""
    values: dict[str, Any] = json.loads(header)
    name = rng.choice([name for name in values if name != "__metadata__"])
    kind, forge = rng.choice(list(FORGED.items()))
    text, body = forge(values, name, body, rng)
    return f"{kind} of {name}", text.encode(), body


Forged = Callable[[dict[str, Any], str, bytes, random.Random], tuple[str, bytes]]


def _offsets(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    offsets = values[name]["data_offsets"]
    offsets[rng.randrange(2)] += rng.choice((-4, -1, 1, 4, 2**40))
    return json.dumps(values), body


def _moved(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    by = rng.choice((-8, -2, 2, 8))
    values[name]["data_offsets"] = [offset + by for offset in values[name]["data_offsets"]]
    return json.dumps(values), body


def _later(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A hole between tensors, with all behind it moved."""
    begin, by = values[name]["data_offsets"][0], rng.choice((1, 4, 64))
    for other, entry in values.items():
        if other != "__metadata__" and entry["data_offsets"][0] >= begin:
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    return json.dumps(values), body[:begin] + bytes(by) + body[begin:]


def _shape(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    values[name]["shape"] = rng.choice(
        ([], [1], [3, 4], [4, 3, 1], [12], [2**61, 2**61, 0], [0, 2**62], [-3, -4], [4.0, 3])
    )
    return json.dumps(values), body


def _dtype(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    values[name]["dtype"] = rng.choice(DTYPES)
    return json.dumps(values), body


def _twice(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The same name with another tensor's bytes behind it."""
    other = rng.choice([one for one in values if one != "__metadata__"])
    text = json.dumps(values)
    return f"{text[:-1]}, {json.dumps(name)}: {json.dumps(values[other])}}}", body


def _alias(values: dict[str, Any], name: str, body: bytes, rng: random.Random) -> tuple[str, bytes]:
    """A second name for a tensor's bytes."""
    values[f"{name}{rng.choice(('x', ' ', chr(10)))}"] = values[name]
    return json.dumps(values), body


def _renamed(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    values[rng.choice(("x", "", "a\n", "\u2028", "__metadata__", "a"))] = values.pop(name)
    return json.dumps(values, ensure_ascii=rng.random() < 0.5), body


def _dropped(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    del values[name]
    return json.dumps(values), body


def _padded(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    text, space = json.dumps(values), rng.choice((" ", "   ", "\n", "\0"))
    return (text + space if rng.random() < 0.5 else space + text), body


def _trailing(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    return json.dumps(values), body + bytes(rng.randrange(1, 9))


def _swapped(
    values: dict[str, Any], name: str, body: bytes, rng: random.Random
) -> tuple[str, bytes]:
    """Another order of the entries, which means the same."""
    names = sorted(values, key=lambda _: rng.random())
    return json.dumps({name: values[name] for name in names}), body


FORGED: dict[str, Forged] = {
    "offsets": _offsets,
    "moved": _moved,
    "later": _later,
    "shape": _shape,
    "dtype": _dtype,
    "twice": _twice,
    "alias": _alias,
    "renamed": _renamed,
    "dropped": _dropped,
    "padded": _padded,
    "trailing": _trailing,
    "swapped": _swapped,
}
