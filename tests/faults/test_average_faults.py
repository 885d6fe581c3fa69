"""The average of the weights comes through whatever befalls the workers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor

from elastrata.checkpoints.commit import list_commits
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.weights import read_weights
from elastrata_pipelines.storage import Storage
from support.live_run import RELATIVE, LiveRun
from support.lone_run import train_alone
from support.nodes import nodes, send, train_workers
from support.synthetic import tiny_recipe, write_data_set

STEPS, EVERY = 400, 100
FAR = 0.01
"""As far apart some of the weights and their averages are, at least; the averages of two runs are
within a fifth of it."""


def _recipe(folder: Path) -> dict[str, Any]:
    write_data_set(folder / "data", samples=2000, held_out=40)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=STEPS,
        optimizer={"lr": 1.5 / STEPS},
        average={"decay": 0.99, "evaluated": True},
        evaluation={"every": EVERY, "samples": 32},
        checkpoint={"every": STEPS, "hot_steps": 10, "hot_bytes": 2**26},
    )
    values["workers"] |= {"max": 3, "cpus": 1, "spares": True, "resize_seconds": 1}
    return values


def _chosen(run: Path, wanted: str) -> dict[str, Tensor]:
    """Of the newest checkpoint."""
    storage = Storage(str(run))
    return dict(read_weights(storage, list_commits(storage.sub("checkpoints"))[0], wanted))


def _evaluations(run: Path) -> dict[int, float]:
    entries = history.read_entries(Storage(str(run)).sub("history"))
    return {e["step"]: e["eval/loss"] for e in history.surviving_evaluations(entries)}


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.matrix
def test_it_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    values = _recipe(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    alone = train_alone(Recipe.model_validate(values), tmp_path / "runs" / "alone")
    with nodes() as cluster:
        cluster.add(cpus=1)
        live = LiveRun(recipe, "live", tmp_path / "log", "--address", cluster.address)
        live.wait_for_group(1)
        cluster.add(cpus=2)
        live.wait_for_group(2)
        send(train_workers(cluster.address)[-1], signal.SIGKILL)
        live.end()
    run = tmp_path / "runs" / "live"
    assert [entry["state"] for entry in live.of_kind("started")][:3] == ["new", "hot", "hot"]
    expected = _evaluations(alone)
    assert list(expected) == list(range(EVERY, STEPS + 1, EVERY))
    assert _evaluations(run) == pytest.approx(expected, rel=RELATIVE)
    averages = _chosen(run, "average")
    assert _distance(averages, _chosen(run, "trained")) > FAR
    assert _distance(averages, _chosen(alone, "average")) < FAR / 5
