"""A recipe of several phases: one run, one record, one progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest
import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata.recipe.data_sets import preparations
from elastrata.recipe.file import load_recipe, to_yaml
from elastrata.run import history
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage
from support.command import kill_group, run, run_json, start, wait_until
from support.synthetic import tiny_recipe, write_data_set

PHASES: list[dict[str, Any]] = [
    {"name": "short"},
    {
        "name": "other",
        "data": {"path": "other"},
        "steps": 20,
        "batch_size": 15,
        "optimizer": {"lr": 5e-4},
        "schedule": {"shape": "constant", "warmup_steps": 4},
    },
    {
        "name": "again",
        "steps": 30,
        "batch_size": 30,
        "batch_size_warmup": {"start": 10, "steps": 5},
    },
]
STEPS = 40 + 20 + 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two data sets and `phases.yaml`."""
    folder = tmp_path_factory.mktemp("phases")
    for name, samples, seed in (("data", 400, 0), ("other", 130, 3)):
        write_data_set(folder / name, samples=samples, seed=seed, held_out=40)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=40,
        optimizer={"lr": 1e-3},
        schedule={"warmup_steps": 10},
        evaluation={"every": 25},
        checkpoint={"every": 10},
        phases=[
            {**phase, **({"data": {"path": str(folder / "other")}} if "data" in phase else {})}
            for phase in PHASES
        ],
    )
    (folder / "phases.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


def _steps(run: Path) -> list[Any]:
    return history.effective_steps(history.read_entries(Storage(str(run / "history"))))


def test_a_phase_says_only_what_is_different(folder: Path) -> None:
    recipe = load_recipe(str(folder / "phases.yaml"))
    first, other, again = recipe.parts
    assert recipe.steps_in_all == STEPS
    assert (first.steps, first.batch_size, first.optimizer.lr) == (40, 21, 1e-3)
    assert (other.data.path, other.data.window_stripes) == (str(folder / "other"), 4)
    assert other.schedule.warmup_steps == 4
    assert again.optimizer == first.optimizer
    assert again.data == first.data
    (folder / "whole.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    assert load_recipe(str(folder / "whole.yaml"), ["name=phases"]) == recipe
    changed = load_recipe(str(folder / "phases.yaml"), ["phases.1.steps=7", "batch_size=9"])
    assert [part.steps for part in changed.parts] == [40, 7, 30]
    assert [part.batch_size for part in changed.parts] == [9, 15, 30]


def test_every_phase_has_its_own_schedule(folder: Path) -> None:
    recipe = load_recipe(str(folder / "phases.yaml"))
    rates = [recipe.learning_rate(step) for step in range(STEPS)]
    assert rates[0] == pytest.approx(1e-3 / 11)
    assert rates[10] == 1e-3
    assert rates[39] == pytest.approx(1e-3 / 30)
    assert rates[40:44] == pytest.approx([5e-4 * k / 5 for k in (1, 2, 3, 4)])
    assert rates[44:60] == [5e-4] * 16
    assert rates[60] == rates[0]
    with pytest.raises(ValueError, match="step 90 of 90"):
        recipe.learning_rate(STEPS)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "phases.1.schedule.warmup_steps=20",
            "phases.1.schedule.warmup_steps: 20: expected fewer than steps (20)",
        ),
        (
            "schedule.warmup_steps=35",
            "phases.2.schedule.warmup_steps: 35: expected fewer than steps (30)",
        ),
        (
            "phases.1.optimizer.betas=[0.8, 0.9]",
            "phases.1.optimizer.betas: [0.8, 0.9]: expected [0.9, 0.98], as in the first phase: "
            "the optimizer's state carries over; only lr may change",
        ),
        (
            "phases.2.data.window_stripes=9",
            "phases.2.data.window_stripes: 9: expected 4, as in an earlier phase, whose order this "
            "one continues",
        ),
        (
            "batch_size_warmup={start: 2, steps: 3}",
            "batch_size_warmup: would apply to every phase: expected it inside one of the phases",
        ),
        ("workers={min: 16, max: 16}", "phases.1.batch_size: 15: expected at least workers.min"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(str(folder / "phases.yaml"), [override])
    assert any(line in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.matrix
def test_one_run_goes_through_all_phases_and_survives_in_each(folder: Path) -> None:
    recipe, runs = folder / "phases.yaml", folder / "runs"
    done = run_json("train", recipe, "--name", "undisturbed")
    expected = _steps(runs / "undisturbed")
    assert [step["step"] for step in expected] == list(range(1, STEPS + 1))
    sizes = [step["batch_samples"] for step in expected]
    assert sizes == [21] * 40 + [15] * 20 + [10, 14, 18, 22, 26] + [30] * 25
    assert done["samples_seen"] == sum(sizes)
    rates = [load_recipe(str(recipe)).learning_rate(step) for step in range(STEPS)]
    assert [step["lr"] for step in expected] == rates

    two = start(
        "train", recipe, "workers.min=2", "workers.max=2", "--name", "killed", log=folder / "log"
    )
    checkpoints = Storage(str(runs / "killed" / "checkpoints"))
    wait_until(
        lambda: any(commit.step >= 40 for commit in list_commits(checkpoints)),
        120,
        "the second phase",
    )
    kill_group(two)
    again = run_json("train", recipe, "--name", "killed")
    assert (again["steps"], again["samples_seen"]) == (STEPS, done["samples_seen"])
    steps = _steps(runs / "killed")
    assert [step["digest"] for step in steps] == [step["digest"] for step in expected]
    # fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps
    losses = [step["loss"] for step in expected]
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=1e-5)

    proof = run_json("audit", runs / "killed", runs / "undisturbed")
    assert (proof["partition_ok"], proof["equal"], proof["digests_checked"]) == (True, True, STEPS)
    client = mlflow.MlflowClient(f"sqlite:///{runs / 'mlflow.db'}")
    evaluated = client.get_metric_history(again["mlflow_run_id"], "eval/loss")
    assert sorted(metric.step for metric in evaluated) == [25, 40, 50, 60, 75, 90]
    assert client.get_run(again["mlflow_run_id"]).data.params["phases.1.steps"] == "20"

    status = run_json("status", runs / "killed")
    assert (status["steps_in_all"], status["progress"], status["state"]) == (STEPS, 1, "finished")
    other = run("train", recipe, "phases.1.optimizer.lr=1e-4", "--name", "killed")
    assert other.returncode == 2
    assert "phases.1.optimizer.lr: 0.0005 in the run of this name, 0.0001" in other.stderr


@pytest.mark.matrix
def test_the_data_sets_of_a_recipe_have_one_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(60):
        words = " ".join(f"word{number * k % 31}" for k in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(words, encoding="utf-8")
    recipe = tmp_path / "two.yaml"
    recipe.write_text(
        "extends: bert/tiny\n"
        "data: {path: short, prepare: {sources: [{paths: text}], seq_len: 32, held_out: 0.2,\n"
        "       tokenizer: {train: wordpiece, vocab_size: 400}}}\n"
        "steps: 2000\nschedule: {warmup_steps: 10}\n"
        "phases: [{}, {data: {path: long, prepare: {seq_len: 64}}}]\n",
        encoding="utf-8",
    )
    plans = preparations(load_recipe(str(recipe)))
    assert [plan.seq_len for plan in plans.values()] == [32, 64]
    made = run_json("prepare", recipe, cwd=tmp_path)["data_sets"]
    assert [one["path"] for one in made] == [str(tmp_path / "short"), str(tmp_path / "long")]
    short, long = (Manifest.read(Storage(one["path"])) for one in made)
    assert short.tokenizer_fingerprint == long.tokenizer_fingerprint
    assert (short.seq_len, long.seq_len) == (32, 64)
    shown = run_json("inspect", recipe, "--phase", 1, "--batch", 16, cwd=tmp_path)
    assert shown["fingerprint"] == long.fingerprint
