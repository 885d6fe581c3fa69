"""Checkpoints that a run committed and did not remove must be there: `status`, `audit` and `runs`
name those that are not. What retention removes is noted in the history first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastrata.checkpoints.commit import MARKER, list_commits
from elastrata.checkpoints.retention import prune
from elastrata.cli.main import run
from elastrata.run import consistency as evidence_module
from elastrata.run import history
from elastrata.run.consistency import check_continuation, read_evidence
from elastrata.run.history import History, HistoryWriter
from elastrata.run.status import status
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints of steps 2 and 4."""
    return lone_run(tmp_path_factory.mktemp("lost"))


@pytest.fixture(scope="module")
def pruned(trained: Path) -> Path:
    """A finished run that keeps one checkpoint, the newest, and has had several."""
    kept = {"every": 1, "keep_last": 1, "keep_best": False}
    return lone_run(trained.parent.parent, "pruned", checkpoint=kept)


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "runs" / "copy")
    return tmp_path / "runs" / "copy"


def _folders(copy: Path) -> list[Path]:
    return sorted((copy / "checkpoints").iterdir())


def _delete_all(copy: Path) -> list[str]:
    names = [path.name for path in _folders(copy)]
    for path in _folders(copy):
        shutil.rmtree(path)
    return [f"{name}: missing" for name in names]


def _delete_the_folder(copy: Path) -> list[str]:
    lines = _delete_all(copy)
    (copy / "checkpoints").rmdir()
    return lines


def _delete_an_older_one(copy: Path) -> list[str]:
    oldest = _folders(copy)[0]
    shutil.rmtree(oldest)
    return [f"{oldest.name}: missing"]


def _delete_a_marker(copy: Path) -> list[str]:
    newest = _folders(copy)[-1]
    (newest / MARKER).unlink()
    return [f"{newest.name}: {MARKER} is missing"]


def _delete_a_file(copy: Path) -> list[str]:
    newest = _folders(copy)[-1]
    file = next(path for path in newest.iterdir() if path.name != MARKER)
    file.unlink()
    return [f"{newest.name}: {file.name} is missing"]


def _cut_a_file(copy: Path) -> list[str]:
    oldest = _folders(copy)[0]
    file = max(oldest.iterdir(), key=lambda path: path.stat().st_size)
    data = file.read_bytes()
    file.unlink()  # a fork's files are links
    file.write_bytes(data[:-1])
    return [f"{oldest.name}: {file.name} is truncated"]


LOSSES: list[Callable[[Path], list[str]]] = [
    _delete_all,
    _delete_the_folder,
    _delete_an_older_one,
    _delete_a_marker,
    _delete_a_file,
    _cut_a_file,
]


@pytest.mark.parametrize("lose", LOSSES)
def test_what_is_lost_is_named(
    lose: Callable[[Path], list[str]], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["audit", str(copy)]) == 0
    assert status(Storage(str(copy))).problems == ()
    lines = lose(copy)
    for command, code in ((["status"], 0), (["audit"], 1)):
        capsys.readouterr()
        assert run([*command, str(copy), "--json"]) == code
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert len(result["problems"]) == len(lines)
        assert all(any(line in problem for problem in result["problems"]) for line in lines)
        assert run([*command, str(copy)]) == code
        shown = "".join(capsys.readouterr().out.split())
        assert all("".join(line.split()) in shown for line in lines)
    assert run(["runs", str(copy.parent), "--json"]) == 0
    captured = capsys.readouterr()
    assert lines[0] in captured.err.replace("\n", "") or "missing" in captured.err
    assert len(json.loads(captured.out)["runs"][0]["problems"]) == len(lines)


def test_nothing_is_removed_that_the_history_could_not_note(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    storage = Storage(str(tmp_path / "checkpoints"))

    def refuse(folders: object) -> None:
        raise OSError("the history cannot be written")

    with pytest.raises(OSError, match="cannot be written"):
        prune(storage, keep_last=1, keep_best=False, before_removal=refuse)
    assert [commit.step for commit in list_commits(storage)] == [4, 2]


@pytest.mark.parametrize("is_pruned", [True, False])
def test_a_run_that_goes_on_meanwhile_is_no_false_alarm(
    copy: Path, monkeypatch: pytest.MonkeyPatch, is_pruned: bool
) -> None:
    """Between the look at the checkpoints and the one at the history a checkpoint is removed, or
    committed."""
    storage, whole = Storage(str(copy)), history.read_history
    aside = copy / "aside"
    if not is_pruned:
        _folders(copy)[-1].rename(aside)

    def meanwhile(*arguments: Any) -> History:
        monkeypatch.setattr(evidence_module.history, "read_history", whole)
        if is_pruned:
            writer = HistoryWriter(storage.sub("history"), 1, pytest.fail)

            def note(folders: Any) -> None:
                writer.add("removed", {"commits": list(folders)})
                assert writer.flush()

            prune(storage.sub("checkpoints"), keep_last=1, keep_best=False, before_removal=note)
        else:
            aside.rename(copy / "checkpoints" / name)
        return whole(*arguments)

    entries = history.read_entries(storage.sub("history"))
    name = [entry["commit"] for entry in entries if entry["kind"] == "committed"][-1]
    monkeypatch.setattr(evidence_module.history, "read_history", meanwhile)
    assert read_evidence(storage).problems == ()
    assert status(storage).problems == ()


def test_what_the_run_has_gone_back_behind_need_not_be_there(copy: Path) -> None:
    storage = Storage(str(copy))
    warned: list[str] = []
    _delete_all(copy)
    check_continuation(storage, warned.append)
    assert [line for line in warned if "missing" in line]
    assert "resuming from the first step, because there is no checkpoint" in warned[-1]
    later = HistoryWriter(storage.sub("history"), 2, pytest.fail)
    later.add("started", {"step": 0, "world_size": 1})
    later.flush()
    assert status(storage).problems == ()
