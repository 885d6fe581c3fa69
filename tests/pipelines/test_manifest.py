"""The manifest: every value is checked when it is read, and it carries its own checksum."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import (
    MANIFEST,
    FileEntry,
    Manifest,
    file_problem,
    file_problems,
)
from elastrata_pipelines.format.manifest import AGAIN, LENGTHS
from elastrata_pipelines.format.shard import by_shard
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
        line.removeprefix(f"{storage.uri(MANIFEST)}: ").removesuffix(f"; {AGAIN}") for line in lines
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


def test_the_layout_of_the_text_does_not_matter(storage: Storage) -> None:
    before = Manifest.read(storage)
    storage.write(json.dumps(_values(storage)).encode(), MANIFEST)
    assert Manifest.read(storage) == before


def test_a_copy_with_other_values_has_another_fingerprint(storage: Storage) -> None:
    manifest = Manifest.read(storage)
    other = manifest.model_copy(update={"seed": manifest.seed + 1})
    assert manifest.model_copy().fingerprint == manifest.fingerprint != other.fingerprint
    assert pickle.loads(pickle.dumps(manifest)) == manifest


def test_of_very_many_lengths_the_header_is_checked(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastrata_pipelines.format.manifest.MOST_LENGTHS_CHECKED", 0)
    monkeypatch.setattr(Manifest, "read_lengths", None)
    manifest = Manifest.read(storage)
    manifest.check_lengths(storage)
    data = storage.read(LENGTHS)
    storage.write(data[:-1], LENGTHS)
    with pytest.raises(UserError, match=rf"bytes, expected {len(data)}\); {AGAIN}"):
        manifest.check_lengths(storage)


def test_a_store_is_asked_for_the_list_of_many_files(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Storage("memory://data")
    manifest = Manifest.read(storage)
    for entry in manifest.files:
        remote.write(storage.read(entry.path), entry.path)
    monkeypatch.setattr("elastrata_pipelines.format.files._REMOTE_FILES_ASKED_FOR", 0)
    asked: list[str] = []
    monkeypatch.setattr(
        "elastrata_pipelines.format.files.file_problem",
        lambda storage, entry: asked.append(entry.path) or file_problem(storage, entry),
    )
    assert (file_problems(remote, manifest), asked) == ([], [])
    (gone, cut), lost = manifest.files[:2], f"{remote.uri()}/"
    remote.delete(gone.path)
    remote.write(b"", cut.path)
    assert file_problems(remote, manifest) == [
        f"{lost}{gone.path}: missing",
        f"{lost}{cut.path}: 0 bytes, the manifest says {cut.bytes}",
    ]
    assert asked == [gone.path, cut.path]


def test_stripes_are_looked_up_among_many_shards(storage: Storage) -> None:
    whole = Manifest.read(storage)
    rest = tuple(entry for entry in whole.files if not entry.stripes)
    shards = tuple(
        FileEntry(path=f"{number}", bytes=1, sha256="0" * 64, samples=count, stripes=count)
        for number, count in enumerate((3, 1, 2))
    )
    manifest = whole.model_copy(update={"files": (*shards, *rest)})
    found = by_shard(manifest, [5, 0, 3, 2, 4])
    assert [(shard.path, first, inside) for shard, first, inside in found] == [
        ("0", 0, [0, 2]),
        ("1", 3, [3]),
        ("2", 4, [5, 4]),
    ]


def test_version_1_is_read_and_keeps_its_fingerprint(tmp_path: Path) -> None:
    """Runs that were begun on it compare with that fingerprint; it is the one of back then."""
    storage = Storage(str(tmp_path))
    storage.write(json.dumps(VERSION_1).encode(), MANIFEST)
    manifest = Manifest.read(storage)
    assert (manifest.version, manifest.samples, manifest.held_out) == (1, 6, None)
    assert manifest.fingerprint == FINGERPRINT
    assert json.loads(manifest.to_json()) == VERSION_1


@pytest.mark.parametrize("key", ["checksum", "held_out"])
def test_a_manifest_does_not_become_one_of_version_1(storage: Storage, key: str) -> None:
    """Whoever alters the version alone leaves keys behind that version 1 has not."""
    values = {**_values(storage), "version": 1}
    values = {name: value for name, value in values.items() if name == key or name in VERSION_1}
    assert _refused(storage, values)[0].startswith(f"{key}: unknown key")


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
    with pytest.raises(UserError, match="nope://x/data: no data set can be read there"):
        Manifest.read(Storage("nope://x/data"))
