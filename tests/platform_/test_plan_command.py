"""`elastrata plan`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastrata.cli.main import run
from elastrata.recipe.file import load_recipe
from support.documented import documented_keys


def test_a_plan_is_shown_explained_written_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, picture = tmp_path / "planned.yaml", tmp_path / "plan.png"
    arguments = ["plan", "gpt/1.3b", "seed=7", "--cluster", "16xA100-80GB", "--price", "2"]
    options = ["--explain", "--write", str(written), "--plot", str(picture), "--json"]
    assert run([*arguments, *options]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("plan")
    assert "MFU" in shown.err
    assert "memory, GiB" in shown.err
    best = result["layouts"][0]
    hours = best["hours"]
    assert best["cost"] == pytest.approx(hours * 16 * 2)
    assert hours == pytest.approx(best["step_seconds"] * result["steps"] / 3600)
    recipe = load_recipe(str(written))
    assert (recipe.seed, recipe.workers.max) == (7, 16)
    assert picture.stat().st_size > 10_000


def test_a_file_that_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "mine.yaml"
    written.write_text("mine\n", encoding="utf-8")
    assert run(["plan", "gpt/125m", "--write", str(written)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert written.read_text(encoding="utf-8") == "mine\n"
