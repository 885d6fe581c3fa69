"""`gs://` and `abfs://`: the same code as for `s3://`, where gcsfs and adlfs are installed, against
emulators of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage
from support.command import run, run_json, wait_until
from support.synthetic import tiny_recipe, write_data_set

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.filterwarnings("ignore:Sending a large body"),  # adlfs, of aiohttp
]
MIB = 2**20
LARGE = 12 * MIB
"""More than one part of an upload: gcsfs and adlfs send 5 MiB at once."""
AZURITES_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Of its only account, the same everywhere: in its manual."""


@pytest.fixture(scope="module", params=["gs", "abfs"])
def bucket(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of an empty bucket; the environment leads clients to it."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gs":
            opened = _google(patch)
        else:
            opened = _azure(patch, tmp_path_factory.mktemp("azurite"))
        with opened as url:
            yield url


@contextmanager
def _google(patch: pytest.MonkeyPatch) -> Iterator[str]:
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # by gRPC, which it does not speak
    gcsfs = pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    port = server._api._httpd.server_port
    patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    patch.setenv("FSSPEC_GS_TOKEN", "anon")
    fsspec.config.set_conf_env(fsspec.config.conf)
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield "gs://bucket"
    fsspec.config.conf.pop("gs", None)
    gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


@contextmanager
def _azure(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[str]:
    adlfs = pytest.importorskip("adlfs")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("needs Azurite: npm install --global azurite")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = ("--blobHost", "127.0.0.1", "--blobPort", str(port))
    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent")
    with (folder / "log").open("w", encoding="utf-8") as log:
        server = subprocess.Popen([azurite, *place, *options], cwd=folder, stdout=log, stderr=log)
    endpoint = f"http://127.0.0.1:{port}/devstoreaccount1"
    patch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;"
        f"AccountKey={AZURITES_KEY};BlobEndpoint={endpoint};",
    )
    try:
        wait_until(lambda: _answers(port), 120, "Azurite")
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        fsspec.filesystem("abfs").mkdir("bucket")
        yield "abfs://bucket"
    finally:
        adlfs.AzureBlobFileSystem.clear_instance_cache()
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_large_object_comes_back_equal(bucket: str) -> None:
    storage, block = Storage(f"{bucket}/large"), os.urandom(MIB)
    with storage.create("large") as stream:
        for _ in range(LARGE // MIB):
            stream.write(block)
    assert storage.names() == ["large"]
    assert storage.sha256("large") == hashlib.sha256(block * (LARGE // MIB)).hexdigest()
    storage.delete("large")
    assert storage.names() == []


def test_a_run_is_the_same_there(bucket: str, tmp_path: Path) -> None:
    tracking = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}"}
    results = {}
    for name, place in (("far", bucket), ("near", str(tmp_path))):
        write_data_set(f"{place}/data", samples=100)
        changes = {"steps": 6, "checkpoint": {"every": 3}, "tracking": tracking}
        recipe = tiny_recipe(f"{place}/data", f"{place}/runs", **changes)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        results[name] = run_json("train", tmp_path / f"{name}.yaml", "--name", name)
    assert results["far"]["final_loss"] == results["near"]["final_loss"]
    assert [commit.step for commit in list_commits(Storage(f"{bucket}/runs/far/checkpoints"))] == [
        6,
        3,
    ]
    audit = run("audit", f"{bucket}/runs/far", tmp_path / "runs" / "near")
    assert audit.returncode == 0, audit.stdout


def test_a_missing_bucket_is_told(bucket: str) -> None:
    with pytest.raises(UserError, match="no data set"):
        Manifest.read(Storage(bucket.replace("bucket", "no-such-bucket/data")))
