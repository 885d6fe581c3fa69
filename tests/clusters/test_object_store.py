"""Object stores that throttle, refuse, lose and alter: survived, or refused in a line."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elastrata.checkpoints.commit import (
    MARKER,
    METADATA,
    Commit,
    FileRecord,
    FolderName,
    find_newest_verified,
)
from elastrata_pipelines import retry
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import Stripes
from support.command import run
from support.faulty_s3 import FaultyS3, faulty_s3
from support.synthetic import tiny_recipe, write_data_set

MIB = 2**20
LARGE = 56 * MIB
"""More than one part of an upload: s3fs sends 50 MiB at once."""


@pytest.fixture
def faults(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """Faults of a store whose clients try again at once."""
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))
    with faulty_s3(os.environ["AWS_ENDPOINT_URL"]) as faults:
        yield faults


@pytest.fixture
def storage(bucket: str, faults: FaultyS3) -> Storage:
    return Storage(f"{bucket}/folder")


def _write_large(storage: Storage, block: bytes) -> None:
    """Writes an object of many equal blocks, as a shard is written."""
    with storage.create("large") as stream:
        for _ in range(LARGE // len(block)):
            stream.write(block)


def test_a_large_object_goes_in_parts_and_comes_back_equal(
    storage: Storage, faults: FaultyS3
) -> None:
    block = os.urandom(MIB)
    _write_large(storage, block)
    parts = [path for method, path in faults.asked if method == "PUT" and "partNumber" in path]
    assert len(parts) > 1
    assert storage.size("large") == LARGE
    assert storage.sha256("large") == hashlib.sha256(block * (LARGE // MIB)).hexdigest()


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (0, "the connection breaks")]
)
def test_throttling_and_errors_of_the_server_are_tried_again(
    status: int, code: str, storage: Storage, faults: FaultyS3
) -> None:
    faults.fail(2, status, code)
    storage.write(b"whole", "small")
    assert faults.refused == 2
    faults.fail(2, status, code)
    assert storage.read("small") == b"whole"
    assert faults.refused == 4


def test_an_upload_that_is_interrupted_leaves_nothing(storage: Storage, faults: FaultyS3) -> None:
    faults.answer = lambda method, path: (500, "InternalError") if "partNumber=2" in path else None
    with pytest.raises(OSError):  # noqa: PT011 - s3fs words it by version
        _write_large(storage, bytes(MIB))
    faults.answer = lambda method, path: None
    assert storage.names() == []
    storage.write(b"again", "large")
    assert storage.read("large") == b"again"


def test_reading_waits_for_a_store_that_is_away(
    bucket: str, faults: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_data_set(f"{bucket}/data", samples=100)
    data = Storage(f"{bucket}/data")
    (expected,) = Stripes(data, manifest).read([1])
    monkeypatch.setattr(retry, "FIRST_SECONDS", 0.01)
    faults.fail(40, 500, "InternalError")  # more often than s3fs itself tries
    assert Stripes(data, manifest).read([1]) == [expected]
    assert faults.refused == 40


def test_reading_does_not_wait_where_that_cannot_help(bucket: str, faults: FaultyS3) -> None:
    manifest = write_data_set(f"{bucket}/data", samples=100)
    data, shard = Storage(f"{bucket}/data"), manifest.shards[0].path
    faults.answer = lambda method, path: (403, "AccessDenied")
    with pytest.raises(UserError, match=r"00000.parquet: may not be read \("):
        Stripes(data, manifest).read([1])
    faults.answer = lambda method, path: None
    content = bytearray(data.read(shard))
    content[len(content) // 3] ^= 1
    data.write(bytes(content), shard)
    with pytest.raises(UserError, match=r"00000.parquet: the shard is damaged \("):
        Stripes(data, manifest).read([0, 1])
    data.delete(shard)
    with pytest.raises(UserError, match=r"00000.parquet: the shard is missing"):
        Stripes(data, manifest).read([1])


def _put(checkpoints: Storage, step: int) -> str:
    """A commit of one small file; its folder."""
    folder, content = str(FolderName(1, step, "0a1b2c")), b"state %d" % step
    for name in ("state", METADATA):
        checkpoints.write(content, folder, name)
    record = FileRecord(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    files = {"state": record, METADATA: record}
    commit = Commit(folder=folder, step=step, samples=0, tokens=0, extra={}, files=files)
    checkpoints.write(commit.to_json(), folder, MARKER)
    return folder


def test_an_object_altered_behind_our_back_is_passed_over(bucket: str) -> None:
    checkpoints = Storage(f"{bucket}/run/checkpoints")
    _put(checkpoints, 1)
    newest = _put(checkpoints, 2)
    checkpoints.write(b"state !", newest, "state")
    said: list[str] = []
    found = find_newest_verified(checkpoints, said.append)
    assert found is not None
    assert found.step == 1
    (line,) = said
    assert newest in line


def test_what_is_refused_takes_one_line_and_nothing_is_begun(
    bucket: str, faults: FaultyS3, tmp_path: Path
) -> None:
    write_data_set(tmp_path / "data", samples=100)
    tracking = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    recipe = tiny_recipe(tmp_path / "data", f"{bucket}/runs", tracking=tracking)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    faults.answer = lambda method, path: (403, "AccessDenied")
    done = run("train", tmp_path / "recipe.yaml", "--name", "run")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"storage: {bucket}/runs: cannot be written (a test")
