"""After a sweep: what its last lines say, and that one can do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.cli.main import run
from elastrata.driver.launch import TrainResult
from elastrata.recipe.recipe import Recipe
from elastrata.run.history import HistoryWriter
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import CONCLUDED, LAUNCHED, SUGGESTED
from elastrata.sweeps.result import JOURNAL, best_recipe, find_sweep, sweep_digest, write_sweep
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from support.documented import documented_keys
from support.synthetic import tiny_recipe

LOSSES = {"0000": 6.2, "0001": 5.9, "0002": 6.4}
KEYS = [f"optimizer.betas.{place}" for place in (0, 1)]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep `lr` of trials of 40 steps of a recipe of 5,000, in `runs`; it has ended."""
    monkeypatch.chdir(tmp_path)
    recipe = tiny_recipe("data", "runs", steps=5000)
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    config = SweepConfig.model_validate(
        {
            "name": "lr",
            "recipe": "recipe.yaml",
            "changes": {"steps": 40, "batch_size": 16},
            "space": {
                "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
                **{key: {"uniform": [0.5, 0.999]} for key in KEYS},
                "schedule.warmup_steps": {"choice": [0, 5]},
                "optimizer.weight_decay": {"choice": [0.01, 0.1]},
            },
        }
    )
    folder = Storage(str(tmp_path / "runs" / "lr"))
    write_sweep(folder, config, Recipe.model_validate({**recipe, "steps": 40}))
    journal = HistoryWriter(folder.sub(JOURNAL), 1, print)
    journal.add(LAUNCHED, {"mlflow_run_id": None, "sweep_sha256": sweep_digest(folder)})
    for place, (trial, loss) in enumerate(LOSSES.items(), start=1):
        values: dict[str, Any] = {"optimizer.lr": place / 100, "optimizer.weight_decay": 0.1}
        values |= {**dict.fromkeys(KEYS, 0.90625), "schedule.warmup_steps": 5}
        journal.add(SUGGESTED, {"trial": trial, "values": values})
        report = {"step": 40, "samples": 640, "tokens": 10_000, "seconds": 1.5}
        journal.add("reported", {"trial": trial, **report, "metrics": {"eval/loss": loss}})
        journal.add(CONCLUDED, {"trial": trial, "state": "finished", "text": ""})
    journal.flush()
    return tmp_path / "runs" / "lr"


@pytest.mark.parametrize("name", ["lr", "runs/lr"])
def test_the_last_lines_say_how_to_go_on(
    name: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "--best", name, "--json"]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines[-2:] == [
        f"  train    elastrata sweep --best {sweep} --train",
        f"  export   elastrata export {sweep}/trials/0001 --out MODEL_FOLDER",
    ]
    result = json.loads(shown.out)
    assert list(result) == documented_keys("sweep")
    assert (result["best"]["trial"], result["best"]["optimizer.lr"]) == ("0001", 0.02)


def test_a_table_is_whole_where_it_is_no_terminal(
    sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(["sweep", "--best", str(sweep)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[: len(LOSSES) + 1]
    names = ["trial", "lr", "betas.0", "betas.1", "warmup_steps", "weight_decay", "eval/loss"]
    assert head.split() == [*names, "step", "tokens", "state"]
    assert rows[0].split() == [
        *("*", "0001", "0.02", "0.906", "0.906", "5", "0.1", "5.9000", "40", "10,000", "finished"),
    ]
    assert len({len(line.rstrip()) for line in rows}) == 1
    assert "…" not in "".join([head, *rows])


def test_the_best_values_are_trained_at_the_recipes_length(sweep: Path) -> None:
    recipe = best_recipe(find_sweep("lr"), {})
    assert (recipe.steps, recipe.batch_size, recipe.optimizer.lr) == (5000, 16, 0.02)
    assert recipe.optimizer.betas == (0.90625, 0.90625)
    assert (recipe.name, recipe.storage) == ("lr-best", str(sweep.parent))
    changed = best_recipe(
        find_sweep("lr"), {"steps": 70, "optimizer.lr": 0.5, "name": "long", "storage": "else"}
    )
    assert (changed.steps, changed.optimizer.lr) == (70, 0.5)
    assert changed.schedule.warmup_steps == 5
    assert (changed.name, changed.storage) == ("long", "else")


def test_the_command_trains_them(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the launch itself, which is that of `elastrata train`."""
    asked: list[Recipe] = []

    def launch(recipe: Recipe, **_: object) -> TrainResult:
        asked.append(recipe)
        raise UserError("data.path: data: no data set here")

    monkeypatch.setattr("elastrata.api.train", launch)
    options = ["steps=60", "optimizer.weight_decay=0", "--name", "long", "--train"]
    assert run(["sweep", "--best", "lr", *options]) == 2
    assert "run long: starting Ray and the workers" in capsys.readouterr().out
    (recipe,) = asked
    assert (recipe.name, recipe.steps, recipe.optimizer.weight_decay) == ("long", 60, 0.0)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "expected a sweep's file, or --best NAME of an earlier sweep"),
        (["lr.yaml", "--train"], "--train: requires --best NAME, the sweep whose best values"),
        (["--best", "none"], "none: no sweep here"),
        (["--best", "lr", "steps=3"], "--best: --name and overrides require --train"),
        (["--best", "lr", "--train", "steps"], "command line: steps: expected key=value"),
        (["--best", "lr", "--train", "stepz=3"], "command line: stepz: 3: unknown key"),
    ],
)
def test_mistakes_take_one_line(
    arguments: list[str], told: str, sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


def test_a_sweep_without_a_value_has_no_best(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Storage(str(sweep / JOURNAL)).delete()
    assert run(["sweep", "--best", "lr", "--train"]) == 2
    assert "no trial has a value of eval/loss yet" in capsys.readouterr().err
    assert run(["sweep", "--best", "lr"]) == 0
    assert "no trial has a value" in capsys.readouterr().out
