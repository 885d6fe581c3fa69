"""The manifest: every value is checked when it is read, and it carries its own checksum."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import (
    MANIFEST,
    Manifest,
)
from elastrata_pipelines.format.manifest import PREPARE_AGAIN_ADVICE
from elastrata_pipelines.storage import Storage
from support.synthetic import Sizes, write_data_set

VERSION_1 = {
    "files": [
        {"bytes": 455, "path": "shards/0.parquet", "samples": 4, "sha256": "ba" * 32, "stripes": 1},
        {"bytes": 409, "path": "shards/1.parquet", "samples": 2, "sha256": "6b" * 32, "stripes": 1},
        {"bytes": 152, "path": "lengths.npy", "samples": 0, "sha256": "93" * 32, "stripes": 0},
    ],
    "format": "elastrata-shards",
    "length_histogram": [0, 0, 0, 0, 0, 3, 1, 1, 1],
    "packing": "none",
    "pairs": False,
    "preparation": "ab" * 32,
    "samples": 6,
    "seed": 0,
    "seq_len": 8,
    "sources": [
        {
            "bytes_read": 35,
            "documents": 3,
            "documents_skipped": 0,
            "name": "tiny",
            "samples": 6,
            "tokens": 36,
            "weight": 2.0,
        }
    ],
    "stripe_size": 4,
    "stripes": 2,
    "token_dtype": "uint16",
    "tokenizer_fingerprint": "synthetic",
    "tokens": 36,
    "version": 1,
    "vocabulary": {
        "continuation_ids": [],
        "mask_id": 4,
        "pad_id": 0,
        "size": 97,
        "special_ids": [0, 1, 2, 3, 4],
    },
}  # fmt: skip
"""A manifest as it was before there was a checksum in it."""
FINGERPRINT = "788fa315f0c23e683df89344f00c52cda2bff9c73c95a44979dcd6c0c75d07a7"
"""What it was called then."""


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    write_data_set(tmp_path, 20, sizes=Sizes(seq_len=12, stripe=8))
    return Storage(str(tmp_path))


def _values(storage: Storage) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(storage.read(MANIFEST))
    return values


def _refused(storage: Storage, values: Any) -> tuple[str, ...]:
    """The lines in which a manifest of these values is refused, without what all have in common."""
    storage.write(json.dumps(values).encode(), MANIFEST)
    with pytest.raises(UserError) as caught:
        Manifest.read(storage)
    lines = caught.value.problems
    assert all(line.startswith(f"{storage.uri(MANIFEST)}: ") for line in lines)
    return tuple(
        line.removeprefix(f"{storage.uri(MANIFEST)}: ").removesuffix(f"; {PREPARE_AGAIN_ADVICE}")
        for line in lines
    )


def test_the_checksum_is_of_all_that_the_manifest_says(storage: Storage) -> None:
    values = _values(storage)
    checksum = values.pop("checksum")
    canonical = json.dumps(values, indent=1, sort_keys=True).encode()
    assert checksum == hashlib.sha256(canonical).hexdigest() == Manifest.read(storage).fingerprint


def test_a_manifest_that_was_altered_is_refused(storage: Storage) -> None:
    values = _values(storage)
    altered = ("altered: its checksum is of something else",)
    assert _refused(storage, {**values, "seed": 1}) == altered
    assert _refused(storage, {**values, "checksum": "0" * 64}) == altered
    assert _refused(storage, {**values, "checksum": 7}) == altered
    assert _refused(storage, {**values, "held_out": "0" * 64}) == altered
    del values["checksum"]
    assert _refused(storage, values) == ("checksum: missing",)


def test_version_1_is_read_and_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Runs that were begun on it compare with that fingerprint; it is the one of back then."""
    storage = Storage(str(tmp_path))
    storage.write(json.dumps(VERSION_1).encode(), MANIFEST)
    manifest = Manifest.read(storage)
    assert (manifest.version, manifest.samples, manifest.held_out) == (1, 6, None)
    assert manifest.fingerprint == FINGERPRINT
    assert json.loads(manifest.to_json()) == VERSION_1


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("samples", "20", "samples: '20': input should be a valid integer"),
        ("samples", -1, "samples: -1: input should be greater than or equal to 0"),
        ("tokens", 2**62, f"tokens: {2**62}: input should be less than {2**62}"),
        ("seq_len", 0, "seq_len: 0: input should be greater than or equal to 1"),
        ("seq_len", 11, "length_histogram: 13 numbers, expected 12"),
        ("samples", 21, "samples: 21: the length histogram counts 20"),
        ("tokens", 1, "tokens: 1: the length histogram counts "),
        ("stripes", 4, "stripes: 4, but the shards hold 3"),
        ("stripe_size", 0, "stripe_size: 0: input should be greater than or equal to 1"),
        ("stripe_size", 7, "files: shards/00000.parquet: 16 samples, expected 14"),
        ("packing", "tight", "packing: 'tight': input should be 'none', 'concat' or 'best_fit'"),
        ("token_dtype", "int64", "token_dtype: 'int64': input should be 'uint16' or 'uint32'"),
        ("vocabulary.pad_id", 2**63, f"vocabulary.pad_id: {2**63}: input should be less than"),
        ("vocabulary.pad_id", 97, "vocabulary.pad_id: 97: expected ids below 97, its size"),
        ("vocabulary.mask_id", 1000, "vocabulary.mask_id: 1000: expected ids below 97, its size"),
        ("vocabulary.special_ids", ["../x"], "vocabulary.special_ids.0: '../x': input should be"),
        ("vocabulary.special_ids", [3, 98], "vocabulary.special_ids: 98: expected ids below 97"),
        ("vocabulary.continuation_ids", [97], "vocabulary.continuation_ids: 97: expected ids"),
        ("vocabulary.size", 70_000, "token_dtype: uint16: too small for the vocabulary's 70000"),
        ("pairs", 1, "pairs: 1: input should be a valid boolean"),
        ("files.0.path", "/etc/passwd", "files.0.path: '/etc/passwd': expected the path of a file"),
        ("files.0.path", "shards/../../x", "files.0.path: 'shards/../../x': expected the path"),
        ("files.0.path", "a\nb", "files.0.path: 'a\\nb': expected the path of a file inside"),
        ("files.0.path", "manifest.json", "files.0.path: 'manifest.json': expected the path of"),
        ("files.0.path", "lengths.npy", "files: lengths.npy: listed twice"),
        ("files.0.bytes", -5, "files.0.bytes: -5: input should be greater than or equal to 0"),
        ("files.0.sha256", "A" * 64, "files.0.sha256: 'AAAA"),
        ("files.0.samples", 0, "files: shards/00000.parquet: 0 samples in 2 stripes"),
        ("files.2.path", "lengths.np", "files: lengths.npy: missing"),
        ("length_histogram.0", 1, "length_histogram.0: expected 0: no sample is empty"),
        ("new\nkey", 1, "new\\nkey: unknown key"),
        ("format", "parquet", "not the manifest of an Elastrata data set"),
        ("version", [2], "format version [2], this Elastrata reads versions 1 and 2"),
        ("version", 9, "format version 9, this Elastrata reads versions 1 and 2"),
        ("version", True, "format version True, this Elastrata reads versions 1 and 2"),
    ],
)  # fmt: skip
def test_every_value_is_checked(storage: Storage, path: str, value: Any, line: str) -> None:
    values = _values(storage)
    *parents, key = path.split(".") if "\n" not in path else [path]
    place = values
    for parent in parents:
        place = place[int(parent) if isinstance(place, list) else parent]
    place[int(key) if isinstance(place, list) else key] = value
    lines = _refused(storage, values)
    assert any(found.startswith(line) for found in lines), lines


def test_what_is_no_manifest_is_refused(storage: Storage) -> None:
    assert _refused(storage, [1]) == ("not the manifest of an Elastrata data set",)
    storage.write(b"[" * 100_000, MANIFEST)
    with pytest.raises(UserError, match="nested deeper"):
        Manifest.read(storage)
    (Path(storage.path(MANIFEST))).unlink()
    with pytest.raises(UserError, match=r"no data set here \(manifest.json is missing\)"):
        Manifest.read(storage)
    assert Manifest.find(storage) is None
    (Path(storage.path(MANIFEST))).symlink_to(MANIFEST)
    with pytest.raises(UserError, match=r"\(manifest.json: .*a link that leads back to itself"):
        Manifest.read(storage)
    with pytest.raises(
        UserError, match="nope://x/data: no storage has URLs that begin with nope://"
    ):
        Manifest.read(Storage("nope://x/data"))
