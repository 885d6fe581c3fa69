"""`elastrata export --push`: the real client of the Hugging Face Hub, against a hub of our own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from elastrata.cli.main import run as run_here
from support.hub import TOKEN, Hub, local_hub
from support.lone_run import lone_run


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lone_run(tmp_path_factory.mktemp("push"), "bert")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with local_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        # The settings of whoever runs the tests, and the protocol of the hub's own storage.
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        yield hub


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_pushed_is_the_export(
    bert: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(bert), "--push", "me/first", "--json", "--out"]
    sharded, whole = tmp_path / "sharded", tmp_path / "whole"
    assert run_here([*command, str(sharded), "--shard-size", "40KB"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert result["pushed"].startswith(f"{hub.url}/me/first/commit/")
    assert f"pushed   {result['pushed']}" in shown.err.splitlines()
    repository = hub.repositories["me/first"]
    assert repository.files == _bytes(sharded)
    assert {"README.md", "config.json", "model.safetensors.index.json"} <= repository.files.keys()
    assert (repository.visibility, repository.messages) == ("private", ["Step 4"])

    assert run_here([*command, str(whole), "--checkpoint", "2"]) == 0
    assert repository.files == _bytes(whole)
    assert "model.safetensors" in repository.files
    assert repository.messages == ["Step 4", "Step 2"]


@pytest.mark.parametrize(
    ("name", "environment", "line"),
    [
        ("me/first", {"HF_TOKEN": ""}, "no token for {hub}: expected one in HF_TOKEN, or from"),
        ("me/first", {"HF_TOKEN": "hf_wrong"}, "refused by {hub}: 401 Unauthorized: Invalid user"),
        ("me/refused", {}, "refused by {hub}: 403 Forbidden: You don't have the rights to create"),
        ("me/a b", {}, "Repo id must use alphanumeric chars"),
        ("a/b/c", {}, "Repo id must be in the form 'repo_name' or 'namespace/repo_name'"),
        ("me/first", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9: cannot be reach"),
    ],
)
def test_what_is_refused_is_told_in_a_line_before_anything_is_written(
    name: str,
    environment: dict[str, str],
    line: str,
    bert: Path,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert run_here(["export", str(bert), "--out", str(tmp_path / "model"), "--push", name]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"--push: {name}: {line.format(hub=hub.url)}")
    assert not (tmp_path / "model").exists()
    assert hub.repositories == {}
