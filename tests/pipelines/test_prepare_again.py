"""Preparing elsewhere, with other parallelism, on S3, or after a kill: the bytes are the same."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from elastrata_pipelines.format import Manifest
from elastrata_pipelines.inspection import verify
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.provenance import PROVENANCE
from elastrata_pipelines.storage import Storage
from support.corpus import whole_config, write_corpus
from support.prepare_child import start_preparation


def checksums(out: str) -> dict[str, str]:
    """The checksum of every file of a data set but those that tell where its text lay."""
    storage = Storage(out)
    held_out = Manifest.read(storage.sub("held_out"))
    return {
        f"{folder}{entry.path}": entry.sha256
        for folder, files in (("", Manifest.read(storage).files), ("held_out/", held_out.files))
        for entry in files
        if entry.path != PROVENANCE
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("here") / "corpus")


@pytest.fixture(scope="module")
def prepared(corpus: Path, ray_local: None) -> Path:
    """The corpus, prepared with two CPUs."""
    out = corpus.parent / "out"
    prepare(PrepareConfig.model_validate(whole_config(str(corpus))), str(out))
    return out


SCREENED = {
    "filters": [{"min_characters": 900}, {"expression": "'x' in text"}],
    "deduplication": {"method": "exact"},
}


@pytest.mark.matrix
def test_what_stays_does_not_depend_on_processes_or_kills(
    corpus: Path, tmp_path: Path, ray_local: None
) -> None:
    """A preparation that is killed while it looks for duplicates and done again with two CPUs, and
    one with a single CPU."""
    config, killed, alone = whole_config(str(corpus), **SCREENED), tmp_path / "a", tmp_path / "b"
    process, reached = start_preparation(1, config, str(killed), stop_at="look for duplicates")
    assert reached.recv() == "look for duplicates"
    process.kill()
    process.join()
    prepare(PrepareConfig.model_validate(config), str(killed))
    process, _ = start_preparation(1, config, str(alone))
    process.join()
    assert process.exitcode == 0
    assert checksums(str(alone)) == checksums(str(killed))
    (source,) = Manifest.read(Storage(str(alone))).sources
    left_out = source.documents_skipped
    assert isinstance(left_out, dict)
    # 60 texts, ten times in lines, and 30 of them in paragraphs as well
    assert left_out["duplicate"] == 9 * 60 + 30
    assert left_out["shorter than 900 characters"] > 0


@pytest.mark.matrix  # a Ray of its own
def test_from_s3_to_s3_gives_the_same_bytes(prepared: Path, corpus: Path, bucket: str) -> None:
    source = Storage(f"{bucket}/corpus")
    for path in corpus.iterdir():
        source.write(path.read_bytes(), path.name)
    out = f"{bucket}/data/set"
    process, _ = start_preparation(2, whole_config(source.url), out)
    process.join()
    assert process.exitcode == 0
    assert checksums(out) == checksums(str(prepared))
    assert verify(Storage(out)) == []
    assert Storage(out).names() == [
        "held_out",
        "lengths.npy",
        "manifest.json",
        "preparation.json",
        "shards",
        "tokenizer",
    ]

    shard = Manifest.read(Storage(out)).shards[0]
    data = bytearray(Storage(out).read(shard.path))
    assert hashlib.sha256(data).hexdigest() == shard.sha256
