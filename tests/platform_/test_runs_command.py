"""Runs by name: their list, the nearest name, and going on without repeating the recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastrata.cli.main import run
from elastrata.run.folder import read_resumed_recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.documented import documented_keys
from support.histories import said, started, stepped, write_run

BEGAN = 1_700_000_000.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, one of them finished, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    for name, last, time in (("first", 4, BEGAN), ("second", 2, BEGAN + 1000)):
        entries = [
            started(1, 0, time=time, world_size=3),
            *(stepped(1, step, time=time + step) for step in range(1, last + 1)),
            said("ended", 1, time=time + 9, status="FINISHED" if last == 4 else "KILLED"),
        ]
        write_run(tmp_path / "runs" / name, entries, data="data", steps=4)
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def test_runs_are_listed_the_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert list(result) == documented_keys("runs")
    told = [(one["name"], one["state"], one["steps"], one["workers"]) for one in result["runs"]]
    assert told == [("second", "stopped", 2, 3), ("first", "finished", 4, 3)]
    assert "4/4" in captured.err
    assert "d ago" in captured.err
    assert run(["runs", "nowhere"]) == 0
    assert "no runs here" in capsys.readouterr().out


def test_a_run_that_cannot_be_read_is_told_and_hides_no_other(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs" / "first" / "history" / "0001-00000000.jsonl").write_text(
        "torn", encoding="utf-8"
    )
    assert run(["runs"]) == 0
    shown = capsys.readouterr().out
    assert "second" in shown
    assert "unreadable" in shown
    assert "first: " in shown


@pytest.mark.parametrize("command", ["status", "audit"])
def test_a_bare_name_is_that_of_a_run(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "first", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == str(folder / "runs" / "first")
    assert run([command, "frist"]) == 2
    assert "(did you mean 'first'?)" in capsys.readouterr().err


def test_a_resumed_run_has_its_own_recipe_wherever_the_command_runs(folder: Path) -> None:
    at_home = Storage(str(folder / "runs" / "first"))
    recipe = read_resumed_recipe(at_home, ["workers.max=7"])
    assert (recipe.name, recipe.storage) == ("first", str(folder / "runs"))
    assert (recipe.steps, recipe.workers.max) == (4, 7)
    with pytest.raises(UserError, match=r"command line: sed: 1: unknown key"):
        read_resumed_recipe(at_home, ["sed=1"])
