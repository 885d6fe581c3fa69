"""A sweep whose driver and one of whose trials are killed ends as an undisturbed one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import yaml
from mlflow import MlflowClient

from elastrata.run import history
from elastrata.sweeps.result import JOURNAL, SweepResult, read_result
from elastrata_pipelines.storage import Storage
from support.command import Command, kill_group, start, wait_until
from support.synthetic import tiny_recipe, write_data_set

TRIALS = 4
SECONDS = 600
TRIAL = "ResourceTrainable"
"""Ray Tune's name for the actor of a trial."""
KEYS = ["trial", "state", "eval/loss", "step", "tokens", "optimizer.lr"]


def _write(folder: Path) -> None:
    """Write a data set, a recipe of 24 steps that is evaluated every 4, and two equal sweeps."""
    write_data_set(folder / "data", samples=300, held_out=40)
    recipe = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=24,
        evaluation={"every": 4, "samples": 32},
        checkpoint={"every": 4},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    for name in ("undisturbed", "disturbed"):
        sweep = {
            "name": name,
            "recipe": str(folder / "recipe.yaml"),
            "space": {"optimizer.lr": {"loguniform": [1e-4, 3e-2]}},
            "trials": TRIALS,
            "concurrency": 2,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(sweep), encoding="utf-8")


def _end(driver: Command, log: Path, folder: Path) -> SweepResult:
    assert driver.wait(SECONDS) == 0, log.read_text(encoding="utf-8")
    return read_result(str(folder))


def _kill_a_trial(driver: Command) -> bool:
    """Kill the process of a trial; return False if none runs now."""
    for process in psutil.Process(driver.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may end meanwhile
            if TRIAL in " ".join(process.cmdline()):
                process.kill()
                return True
    return False


def test_a_killed_driver_and_a_killed_trial_change_nothing(tmp_path: Path) -> None:
    _write(tmp_path)
    log = tmp_path / "log"
    journal = Storage(str(tmp_path / "runs" / "disturbed" / JOURNAL))

    def reports() -> int:
        return sum(entry["kind"] == "reported" for entry in history.read_entries(journal))

    driver = start("sweep", tmp_path / "disturbed.yaml", log=log)
    wait_until(lambda: reports() >= 3, SECONDS, "reports")
    kill_group(driver)
    before = reports()
    driver = start("sweep", tmp_path / "disturbed.yaml", log=log)
    wait_until(lambda: reports() > before, SECONDS, "more reports")
    wait_until(lambda: _kill_a_trial(driver), SECONDS, "a trial")
    disturbed = _end(driver, log, tmp_path / "runs" / "disturbed")

    driver = start("sweep", tmp_path / "undisturbed.yaml", log=log)
    undisturbed = _end(driver, log, tmp_path / "runs" / "undisturbed")

    assert undisturbed.trials[KEYS].equals(disturbed.trials[KEYS])
    concluded = [e["trial"] for e in history.read_entries(journal) if e["kind"] == "concluded"]
    assert len(concluded) == len(set(concluded)) == TRIALS
    _assert_on_record(tmp_path, undisturbed)
    _assert_on_record(tmp_path, disturbed)


def _assert_on_record(folder: Path, result: SweepResult) -> None:
    """Every evaluation and every step of every trial is in MLflow, once."""
    client = MlflowClient(f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    whole = client.get_run(result.mlflow_run_id)
    found = client.search_runs(
        [whole.info.experiment_id], f"tags.`mlflow.parentRunId` = '{whole.info.run_id}'"
    )
    runs = {run.data.tags["trial"]: run.info.run_id for run in found}
    assert len(runs) == len(found)
    assert runs.keys() == result.standings.trials.keys()
    for trial, run_id in runs.items():
        reported = [report.step for report in result.standings.trials[trial].reports]
        evaluated = client.get_metric_history(run_id, "eval/loss")
        assert [metric.step for metric in evaluated] == reported
        trained = client.get_metric_history(run_id, "train/loss")
        assert [metric.step for metric in trained] == list(range(1, len(trained) + 1))
