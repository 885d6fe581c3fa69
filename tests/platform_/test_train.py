"""The main job through the real Ray Train: it ends, it survives, it continues, at any size."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import kill_group, run, run_json, start, wait_until
from support.synthetic import tiny_recipe, write_data_set

STEPS = 120
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a recipe that takes a checkpoint every 10 of its 120 steps of 21 samples."""
    folder = tmp_path_factory.mktemp("train")
    write_data_set(folder / "data", samples=400, held_out=50)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        optimizer={"lr": 1e-2},
        checkpoint={"every": 10},
        evaluation={"every": 60},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> dict[str, Any]:
    return run_json("train", recipe, "--name", "undisturbed")


def _steps(recipe: Path, name: str) -> list[Any]:
    entries = history.read_entries(Storage(str(recipe.parent / "runs" / name / "history")))
    return history.effective_steps(entries)


def _assert_same_run(recipe: Path, name: str) -> None:
    expected, steps = _steps(recipe, "undisturbed"), _steps(recipe, name)
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert [s["digest"] for s in steps] == [s["digest"] for s in expected]
    assert [s["loss"] for s in steps] == pytest.approx([s["loss"] for s in expected], rel=RELATIVE)


def _has_commit(recipe: Path, name: str) -> bool:
    return bool(list_commits(Storage(str(recipe.parent / "runs" / name / "checkpoints"))))


def test_a_run_learns_and_says_what_it_did(recipe, undisturbed) -> None:
    steps = _steps(recipe, "undisturbed")
    assert undisturbed == {
        "run_dir": str(recipe.parent / "runs" / "undisturbed"),
        "mlflow_run_id": undisturbed["mlflow_run_id"],
        "steps": STEPS,
        "samples_seen": 21 * STEPS,
        "tokens_seen": steps[-1]["tokens"],
        "final_loss": steps[-1]["loss"],
        "world_sizes": [1],
        "status": "FINISHED",
        "target": None,
    }
    first, last = steps[0]["loss"], undisturbed["final_loss"]
    assert last < first - 0.5, "every sample is one token over and over"
    assert all(step["padding"] == 0 for step in steps)


def test_a_finished_run_is_not_run_again(recipe, undisturbed) -> None:
    assert run_json("train", recipe, "--name", "undisturbed") == undisturbed


@pytest.mark.matrix  # two launches
def test_killed_driver_resumes_at_a_larger_size(recipe, undisturbed, tmp_path) -> None:
    name, workers = "killed", 3
    two = start(
        "train", recipe, "workers.min=2", "workers.max=2", "--name", name, log=tmp_path / "log"
    )
    wait_until(lambda: _has_commit(recipe, name), 300, "a first checkpoint")
    kill_group(two)

    others = [f"workers.min={workers}", f"workers.max={workers}"]
    done = run_json("train", recipe, *others, "--name", name)

    assert done["world_sizes"] == [2, workers]
    assert done["samples_seen"] == undisturbed["samples_seen"]
    assert done["tokens_seen"] == undisturbed["tokens_seen"]
    _assert_same_run(recipe, name)
    _assert_logged_once(recipe, name, done["mlflow_run_id"])
    _assert_checkpoints_recorded(recipe, name, done["mlflow_run_id"])


def _assert_logged_once(recipe: Path, name: str, run_id: str) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    run_record = client.get_run(run_id)
    assert run_record.info.status == "FINISHED"
    logged = [metric.step for metric in client.get_metric_history(run_id, "train/loss")]
    assert sorted(logged) == list(range(1, STEPS + 1))
    assert [m.step for m in client.get_metric_history(run_id, "eval/loss")] == [60, 120]
    assert run_record.data.params["batch_size"] == "21"
    assert int(run_record.data.params["model.parameters"]) > 10_000
    assert run_record.data.tags["hardware.nodes"] == "1"
    inputs = [one.dataset.name.rpartition("/")[2] for one in run_record.inputs.dataset_inputs]
    assert sorted(inputs) == ["data", "held_out"]
    (output,) = run_record.outputs.model_outputs
    assert client.get_logged_model(output.model_id).params["step"] == str(STEPS)
    artifacts = {item.path for item in client.list_artifacts(run_id)}
    assert artifacts == {"recipe.yaml", "given.yaml", "report.json", "plots"}
    of_that_name = f"tags.mlflow.runName = '{name}'"
    assert len(client.search_runs([run_record.info.experiment_id], of_that_name)) == 1


def _assert_checkpoints_recorded(recipe: Path, name: str, run_id: str) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    models = client.search_logged_models(
        [client.get_run(run_id).info.experiment_id], filter_string=f"source_run_id = '{run_id}'"
    )
    checkpoints = Storage(str(recipe.parent / "runs" / name / "checkpoints"))
    present = [checkpoints.uri(commit.folder) for commit in list_commits(checkpoints)]
    assert sorted(model.tags["uri"] for model in models) == sorted(present)


@pytest.mark.matrix  # two groups of two workers
def test_killed_worker_costs_steps_but_no_samples(
    recipe, undisturbed, tmp_path, workers_are_children
) -> None:
    name = "worker-lost"
    driver = start(
        "train", recipe, "workers.min=2", "workers.max=2", "--name", name, log=tmp_path / "log"
    )
    wait_until(lambda: _has_commit(recipe, name), 300, "a first checkpoint")
    started = psutil.Process(driver.pid).children(recursive=True)
    workers = [process for process in started if _is_actor(process, "RayTrainWorker")]
    # it would take the workers' resources away as soon as another cluster has a dashboard here
    assert not any(_is_actor(process, "PlacementGroupCleaner") for process in started)
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)

    assert driver.wait(timeout=180) == 0, (tmp_path / "log").read_text(encoding="utf-8")
    attempts = [
        entry["world_size"]
        for entry in history.read_entries(Storage(str(recipe.parent / "runs" / name / "history")))
        if entry["kind"] == "started"
    ]
    assert attempts == [2, 2]
    _assert_same_run(recipe, name)


@pytest.mark.matrix  # two launches
def test_damaged_checkpoint_falls_back_to_the_one_before(recipe, undisturbed, tmp_path) -> None:
    whole = recipe.parent / "runs" / "undisturbed"
    shutil.copytree(whole, recipe.parent / "runs" / "damaged")
    checkpoints = recipe.parent / "runs" / "damaged" / "checkpoints"
    newest, older = list_commits(Storage(str(checkpoints)))[:2]
    _alter(checkpoints / newest.folder / "__0_0.distcp")

    done = run("train", recipe, "--name", "damaged", "--json")

    assert done.returncode == 0, done.stderr
    assert "__0_0.distcp is altered" in done.stderr
    assert f"falling back to the checkpoint of step {older.step}" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["world_sizes"] == [1, 1]
    _assert_same_run(recipe, "damaged")

    redone = list_commits(Storage(str(checkpoints)))
    for commit in redone:
        _alter(checkpoints / commit.folder / "__0_0.distcp")
    done = run("train", recipe, "--name", "damaged")
    assert done.returncode == 2
    assert f"{redone[0].folder}: __0_0.distcp is altered" in done.stderr


def _alter(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] = (data[len(data) // 2] + 1) % 256  # twice is altered, too
    path.write_bytes(bytes(data))


def _is_actor(process: psutil.Process, name: str) -> bool:
    return f"ray::{name}" in " ".join(process.cmdline())


def test_another_recipe_is_refused_by_its_keys(recipe, undisturbed) -> None:
    done = run("train", recipe, "--name", "undisturbed", "optimizer.lr=0.5", "seed=3")
    assert done.returncode == 2
    assert "optimizer.lr: 0.01 in the run of this name, 0.5 in this recipe" in done.stderr
    assert "seed: 0 in the run of this name, 3 in this recipe" in done.stderr


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("batch_size=401", "batch_size: 401: larger than the data set (400 samples in "),
        ("data.path=nowhere", "no data set here (manifest.json is missing)"),
        ("storage=recipe.yaml/runs", "storage: recipe.yaml/runs: cannot be written"),
        (
            "workers.min=99 workers.max=99 workers.cpus=100 batch_size=99",
            "workers.min: 99: needs 9900 CPUs, the cluster has",
        ),
    ],
)
def test_input_that_cannot_work_is_refused(recipe, override, line) -> None:
    done = run("train", recipe, *override.split(), "--name", "refused", cwd=recipe.parent)
    assert done.returncode == 2, done.stderr
    assert line in done.stderr
    assert "Traceback" not in done.stderr
    assert not (recipe.parent / "runs" / "refused").exists()
