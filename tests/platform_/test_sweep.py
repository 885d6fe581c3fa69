"""Sweeps through the real Ray Tune: they end, survive, continue, and are recorded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import yaml
from mlflow import MlflowClient

import elastrata
from elastrata.checkpoints.commit import list_commits
from elastrata.run import history
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.plots import PICTURES
from elastrata.sweeps.result import PLOTS, REPORT_FILE, SweepResult, read_result
from elastrata_pipelines.storage import Storage
from support.command import start
from support.documented import documented_keys
from support.synthetic import tiny_recipe, write_data_set

STEPS, EVERY = 24, 4
SECONDS = 600
"""By then something must have happened, on the busiest machine."""
pytestmark = pytest.mark.timeout(2400)  # many drivers, one after the other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set and a recipe of 24 steps, evaluated every 4."""
    folder = tmp_path_factory.mktemp("sweep")
    write_data_set(folder / "data", samples=300, held_out=40)
    recipe = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        evaluation={"every": EVERY, "samples": 32},
        checkpoint={"every": EVERY},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return folder


def _config(folder: Path, name: str, **changes: Any) -> SweepConfig:
    values = {
        "name": name,
        "recipe": str(folder / "recipe.yaml"),
        "space": {
            "optimizer.lr": {"loguniform": [1e-4, 3e-2]},
            "clip.max_norm": {"choice": [0.5, 1.0]},
        },
        "trials": 4,
        **changes,
    }
    return SweepConfig.model_validate(values)


def _written(config: SweepConfig, folder: Path) -> Path:
    path = folder / f"{config.name}.yaml"
    path.write_text(
        yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8"
    )
    return path


def _to_its_end(config: Path, folder: Path) -> dict[str, Any]:
    """What the command prints at the end of a sweep."""
    log = folder / "log"
    assert start("sweep", config, "--json", log=log).wait(SECONDS) == 0, log.read_text(
        encoding="utf-8"
    )
    summary: dict[str, Any] = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    return summary


def _parts(folder: Path, result: SweepResult) -> dict[str, Any]:
    """MLflow's run of every trial, by its id."""
    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    whole = client.get_run(result.mlflow_run_id)
    found = client.search_runs(
        [whole.info.experiment_id], f"tags.`mlflow.parentRunId` = '{whole.info.run_id}'"
    )
    parts = {part.data.tags["trial"]: part for part in found}
    assert len(parts) == len(found)
    return parts


def _assert_whole(folder: Path, result: SweepResult) -> None:
    """Every trial is on record once, with every evaluation that it reported, once."""
    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    parts = _parts(folder, result)
    assert parts.keys() == result.standings.trials.keys()
    for id, trial in result.standings.trials.items():
        logged = client.get_metric_history(parts[id].info.run_id, "eval/loss")
        assert [metric.step for metric in logged] == [report.step for report in trial.reports]
        steps = client.get_metric_history(parts[id].info.run_id, "train/loss")
        assert [m.step for m in steps] == list(range(1, len(steps) + 1))


@pytest.mark.matrix  # six trials
@pytest.mark.usefixtures("ray_local")
def test_a_sweep_from_python(folder: Path) -> None:
    config = _config(
        folder,
        "python",
        space={
            "optimizer.lr": {"choice": [1e-2, 1e-3, 1e30]},
            "schedule.warmup_steps": {"choice": [0, 5]},
        },
        searcher={"name": "grid"},
        scheduler={"name": "asha", "reduction_factor": 2},
        concurrency=1,
    )
    result = elastrata.sweep(config)
    assert result.status == "FINISHED"
    states = list(result.trials["state"])
    assert len(states) == 6
    assert states.count("diverged") == 2
    assert "stopped" in states
    best = result.best
    assert best is not None
    assert best.state == "finished"
    assert result.best_value == result.trials["eval/loss"].min()
    _assert_whole(folder, result)
    parts = _parts(folder, result)
    assert [id for id, part in parts.items() if part.data.tags["best"] == "True"] == [best.id]
    saved = {
        id: list_commits(Storage(result.folder).sub("trials", id, "checkpoints")) for id in parts
    }
    assert [id for id, found in saved.items() if found] == [best.id]
    assert saved[best.id][0].step == STEPS
    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    registered = client.get_model_version_by_alias("python", "best")
    assert registered.run_id == parts[best.id].info.run_id
    logged = client.get_logged_model(registered.tags["model_id"])
    assert f"/trials/{best.id}/" in logged.tags["checkpoint"]
    assert Path(url2pathname(urlsplit(registered.source).path), "MLmodel").is_file()
    whole = client.get_run(result.mlflow_run_id)
    names = {one.dataset.name.rpartition("/")[2] for one in whole.inputs.dataset_inputs}
    assert names == {"data", "held_out"}
    artifacts = {item.path for item in client.list_artifacts(whole.info.run_id)}
    assert artifacts == {"sweep.yaml", "recipe.yaml", REPORT_FILE, PLOTS}
    storage = Storage(result.folder)
    assert storage.names(PLOTS) == sorted(f"{name}.png" for name in PICTURES)
    assert storage.read(REPORT_FILE).count(b"data:image/png") == len(PICTURES)
    again = read_result(result.folder)
    assert again.trials.equals(result.trials)
    assert list(result.summary()) == documented_keys("sweep")


@pytest.mark.matrix
def test_a_copy_begins_with_the_loss_of_its_original(folder: Path) -> None:
    config = _config(
        folder,
        "population",
        space={"optimizer.lr": {"loguniform": [1e-6, 3e-2]}},
        scheduler={"name": "pbt", "interval_tokens": 1},
        trials=4,
        concurrency=2,
    )
    summary = _to_its_end(_written(config, folder), folder)
    result = read_result(summary["sweep"])
    trials = result.standings.trials
    copies = [copied for trial in trials.values() for copied in trial.copies]
    assert copies
    for copied in copies:
        reported = {
            report.metrics["eval/loss"]
            for report in trials[copied.source].reports
            if report.step == copied.step
        }
        assert copied.metrics["eval/loss"] in reported


@pytest.mark.matrix
def test_trials_of_two_workers_are_elastic_runs(folder: Path) -> None:
    config = _config(
        folder,
        "groups",
        changes={"workers.max": 2, "workers.min": 1, "workers.cpus": 0.4},
        concurrency=2,
        scheduler={"name": "asha", "reduction_factor": 2},
        trials=3,
    )
    summary = _to_its_end(_written(config, folder), folder)
    result = read_result(summary["sweep"])
    assert {trial.state for trial in result.standings.trials.values()} <= {"finished", "stopped"}
    assert result.best is not None
    run = Storage(result.folder).sub("trials", result.best.id, "history")
    assert 2 in history.world_sizes(history.read_entries(run))
    _assert_whole(folder, result)
