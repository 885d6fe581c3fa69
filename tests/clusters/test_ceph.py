"""Ceph's S3 server: one that has users and rights, as a store on this machine alone has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from s3fs import S3FileSystem

from elastrata.checkpoints.commit import list_commits
from elastrata_pipelines.storage import Storage
from support.ceph import BUCKET, Ceph, ceph, user
from support.command import run, run_json, wait_until
from support.synthetic import tiny_recipe, write_data_set

pytestmark = pytest.mark.matrix
URL = f"s3://{BUCKET}"
ENDLESS_UPLOAD = """
import sys
from elastrata_pipelines.storage import Storage
with Storage(sys.argv[1]).create("large") as stream:
    while True:
        stream.write(bytes(2**20))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Ceph]:
    with ceph() as server:
        yield server


def _write_recipe(folder: Path, storage: str, data: str, **changes: object) -> Path:
    tracking = {"uri": f"sqlite:///{folder / 'mlflow.db'}"}
    recipe = tiny_recipe(data, storage, tracking=tracking, **changes)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder / "recipe.yaml"


def test_a_killed_writer_leaves_no_object(server: Ceph) -> None:
    writer = subprocess.Popen([sys.executable, "-c", ENDLESS_UPLOAD, f"{URL}/cut"])
    client = S3FileSystem()
    wait_until(
        lambda: client.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads"),
        120,
        "an upload that has begun",
    )
    writer.kill()
    writer.wait()
    assert Storage(f"{URL}/cut").names() == []


@pytest.mark.parametrize(
    ("settings", "bucket", "told"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, BUCKET, "PermissionError"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, BUCKET, "PermissionError"),
        ("another", BUCKET, "PermissionError"),
        ({}, "no-such-bucket", "FileNotFoundError"),
    ],
    ids=["wrong secret", "unknown key", "no permission", "no such bucket"],
)
def test_what_it_refuses_takes_one_line_and_nothing_is_begun(
    settings: Mapping[str, str] | str, bucket: str, told: str, server: Ceph, tmp_path: Path
) -> None:
    write_data_set(tmp_path / "data", samples=100)
    recipe = _write_recipe(tmp_path, f"s3://{bucket}/runs", str(tmp_path / "data"))
    own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with user(server.add_user(settings) if isinstance(settings, str) else {**own, **settings}):
        done = run("train", recipe, "--name", "refused")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"storage: s3://{bucket}/runs: cannot be written ({told}")
    assert not (tmp_path / "mlflow.db").exists()
    assert Storage(f"{URL}/runs/refused").names() == []


def test_data_that_may_not_be_read_is_told(server: Ceph, tmp_path: Path) -> None:
    write_data_set(f"{URL}/data", samples=100)
    recipe = _write_recipe(tmp_path, str(tmp_path / "runs"), f"{URL}/data")
    with user(server.add_user("reader")):
        done = run("train", recipe, "--name", "refused")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{URL}/data: no data set can be read there (")


def test_a_run_is_the_same_there(server: Ceph, tmp_path: Path) -> None:
    write_data_set(f"{URL}/data", samples=100)
    changes = {"steps": 6, "checkpoint": {"every": 3}}
    far = _write_recipe(tmp_path, f"{URL}/runs", f"{URL}/data", **changes)
    remote = run_json("train", far, "--name", "far")
    write_data_set(tmp_path / "data", samples=100)
    near = _write_recipe(tmp_path, str(tmp_path / "runs"), str(tmp_path / "data"), **changes)
    local = run_json("train", near, "--name", "near")
    assert remote["final_loss"] == local["final_loss"]
    assert [commit.step for commit in list_commits(Storage(f"{URL}/runs/far/checkpoints"))] == [
        6,
        3,
    ]
    audit = run("audit", f"{URL}/runs/far", tmp_path / "runs" / "near")
    assert audit.returncode == 0, audit.stdout
