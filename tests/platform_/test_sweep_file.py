"""Sweeps on disk: every mistake in one line, all of them at once, before anything starts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from elastrata.cli.main import run
from elastrata.recipe.recipe import WorkersConfig
from elastrata.sweeps.config import load_sweep, sweep_schema
from elastrata.sweeps.driver import divide_cluster
from elastrata.sweeps.result import check_same_sweep, write_sweep
from elastrata.sweeps.trial_recipe import base_recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

SOUND: dict[str, Any] = {
    "recipe": "bert/tiny",
    "changes": {"steps": 40, "schedule.warmup_steps": 5},
    "space": {
        "optimizer.lr": {"loguniform": [1e-4, 1e-2]},
        "optimizer.name": {"choice": ["adamw", "lamb"]},
        "optimizer.trust_max": {"uniform": [1, 10], "when": {"optimizer.name": "lamb"}},
        "optimizer.betas.1": {"uniform": [0.9, 0.999]},
        "schedule.warmup_steps": {"int": [0, 20]},
    },
}


def _written(folder: Path, **changes: Any) -> str:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**SOUND, **changes}, sort_keys=False), encoding="utf-8")
    return str(path)


def _problems(folder: Path, **changes: Any) -> list[str]:
    path = _written(folder, **changes)
    with pytest.raises(UserError) as raised:
        load_sweep(path)
    return [line.removeprefix(f"{path}: ") for line in raised.value.problems]


def test_a_sound_sweep_and_changes_on_the_command_line(tmp_path: Path) -> None:
    sweep = load_sweep(_written(tmp_path), ["trials=4", "batch_size=4"])
    assert (sweep.name, sweep.trials, sweep.changes["batch_size"]) == ("sweep", 4, 4)


def test_all_mistakes_at_once(tmp_path: Path) -> None:
    told = _problems(
        tmp_path,
        metric="eval/los",
        searcher={"name": "grid"},
        space={
            "optimizer.lrr": {"loguniform": [1e-2, 1e-4], "points": 3},
            "optimizer.eps": {"loguniform": [0, 1e-4], "points": 3},
            "optimizer.name": {"choice": ["adamw", "lamb"]},
            "workers.max": {"int": [1, 2]},
            "optimizer.trust_max": {"uniform": [1, 10], "when": {"optimizer.name": "lam"}},
        },
    )
    assert told == [
        "space.optimizer.lrr: unknown key of the recipe (did you mean 'optimizer.lr'?)",
        "space.workers.max: cannot differ between the trials of a sweep",
        "metric: 'eval/los': not reported by the recipe; expected one of eval/loss, "
        "eval/mlm_loss, eval/mlm_accuracy (did you mean 'eval/loss'?)",
        "space.optimizer.lrr: [0.01, 0.0001]: expected the smaller value first",
        "space.optimizer.eps: [0, 0.0001]: expected ends above 0",
        "space.optimizer.trust_max: when.optimizer.name: 'lam': expected one of 'adamw', 'lamb'",
        "space.optimizer.trust_max.points: missing: a grid needs a number of values",
    ]


def test_what_does_not_even_fit_is_told_with_the_rest(tmp_path: Path) -> None:
    told = _problems(
        tmp_path, metrik="eval/loss", space={"optimizer.lrr": {"choise": [1]}}, trials=0
    )
    assert told[:3] == [
        "space.optimizer.lrr: expected one of uniform, loguniform, int, choice "
        "(did you mean 'choice'?)",
        "trials: 0: expected a whole number above 0",
        "metrik: 'eval/loss': unknown key (did you mean 'metric'?)",
    ]
    assert told[3].startswith("space.optimizer.lrr: unknown key of the recipe")


@pytest.mark.parametrize(
    ("changes", "is_one"),
    [
        ({}, True),
        ({"searcher": {"name": "optuna", "seed": 3}, "scheduler": {"name": "none"}}, True),
        ({"max_seconds": None, "concurrency": "auto", "keep": "all"}, True),
        ({"trials": True}, False),
        ({"max_seconds": True}, False),
        ({"trials": 0}, False),
        ({"keep": "some"}, False),
        ({"space": {}}, False),
        ({"space": {"optimizer.lr": {"loguniform": [1e-4]}}}, False),
        ({"searcher": {"name": "grid", "seed": 3}}, False),
        ({"trials": 16.0}, True),
        ({"trials": 16.5}, False),
    ],
)
def test_the_schema_takes_what_the_loader_takes(
    changes: dict[str, Any], is_one: bool, tmp_path: Path
) -> None:
    values = {**SOUND, **changes}
    assert jsonschema.Draft202012Validator(sweep_schema()).is_valid(values) == is_one
    with nullcontext() if is_one else pytest.raises(UserError, match=next(iter(changes), "")):
        load_sweep(_written(tmp_path, **changes))


def test_values_that_the_recipe_does_not_take(tmp_path: Path) -> None:
    told = _problems(
        tmp_path,
        space={
            "optimizer.lr": {"uniform": [-1, 1]},
            "optimizer.name": {"choice": ["adamw", "lam"]},
            "schedule.warmup_steps": {"int": [0, 100]},
        },
    )
    assert told == [
        "space.optimizer.lr: -1.0: optimizer.lr: -1.0: expected a number above 0",
        "space.optimizer.name: 'lam': optimizer.name: 'lam': expected 'adamw', 'lamb' or 'muon' "
        "(did you mean 'lamb'?)",
        "space.schedule.warmup_steps: 100: schedule.warmup_steps: 100: expected fewer than steps "
        "(40)",
    ]


def test_population_based_training_changes_only_what_a_run_can_go_on_with(tmp_path: Path) -> None:
    changes = {**SOUND["changes"], "evaluation.every": 10}
    told = _problems(
        tmp_path,
        changes=changes,
        scheduler={"name": "pbt"},
        searcher={"name": "grid"},
        space={
            "workload.mask_probability": {"uniform": [0.1, 0.2], "points": 2},
            "optimizer.lr": {"loguniform": [1e-4, 1e-2], "points": 2},
        },
    )
    assert [line.split(":")[0] for line in told] == [
        "searcher.name",
        "space.workload.mask_probability",
    ]


def test_the_command_ends_with_2_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = _written(tmp_path, metric="loss")
    assert run(["sweep", path]) == 2
    assert "metric: 'loss': not reported by the recipe" in capsys.readouterr().err
    assert run(["sweep", "none.yaml"]) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["sweep.yaml"]


def test_a_trial_has_its_values_and_all_else_from_the_base() -> None:
    base = base_recipe("bert/tiny", SOUND["changes"])
    recipe = base.trial({"optimizer.name": "lamb", "optimizer.betas.1": 0.95, "clip.max_norm": 2.0})
    assert (recipe.optimizer.name, recipe.optimizer.betas) == ("lamb", (0.9, 0.95))
    assert (recipe.clip.max_norm, recipe.steps, recipe.optimizer.lr) == (2.0, 40, 2e-3)
    assert base.recipe.optimizer.name == "adamw"


def test_a_sweep_that_is_there_is_not_continued_as_another_one(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path / "folder"))
    sweep = load_sweep(_written(tmp_path))
    base = base_recipe(sweep.recipe, sweep.changes).recipe
    write_sweep(folder, sweep, base)
    check_same_sweep(folder, sweep.model_copy(update={"trials": 99}), base)
    with pytest.raises(UserError, match=r"metric: 'eval/loss' in the sweep of this name"):
        check_same_sweep(folder, sweep.model_copy(update={"metric": "eval/mlm_accuracy"}), base)
    with pytest.raises(UserError, match=r"steps: 40 in the sweep of this name, 41 in this one"):
        check_same_sweep(folder, sweep, base.model_copy(update={"steps": 41}))


def test_trials_share_a_machine_without_a_fight() -> None:
    two = {"CPU": 2.0}
    one_worker = WorkersConfig(cpus=0.5)
    auto = divide_cluster(one_worker, two, "auto", trials=16)
    assert (auto.count, auto.cpus, auto.threads, auto.gpus) == (2, 1.0, 1, 0.0)
    assert divide_cluster(one_worker, two, 1, trials=16).threads == 2
    assert divide_cluster(one_worker, two, 8, trials=16).cpus == 0.25
    assert divide_cluster(one_worker, {"CPU": 8.0, "GPU": 4.0}, "auto", trials=16).count == 4
    groups = divide_cluster(WorkersConfig(max=2, cpus=0.5), {"CPU": 4.0}, "auto", trials=16)
    assert (groups.count, groups.threads, groups.gpus) == (2, 1, 0.0)
    with pytest.raises(UserError, match="room for 3 trials of 2 workers"):
        divide_cluster(WorkersConfig(max=2, cpus=0.5), {"CPU": 3.5}, 4, trials=16)
    with pytest.raises(UserError, match="a trial needs 3 CPUs"):
        divide_cluster(WorkersConfig(max=3, cpus=1.0), two, "auto", trials=1)
