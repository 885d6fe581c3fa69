"""A fork that is killed goes on as one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.checkpoints.commit import list_commits
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata_pipelines.storage import Storage
from support.command import kill_group, run_json, start, wait_until
from support.live_run import RELATIVE
from support.synthetic import tiny_recipe, write_data_set

STEPS, AT = 120, 40
TWO = ("workers.min=2", "workers.max=2")


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """The folder of an undisturbed run, with a checkpoint every 10 of its 120 steps."""
    write_data_set(tmp_path / "data", samples=400)
    values = tiny_recipe(
        tmp_path / "data",
        tmp_path / "runs",
        steps=STEPS,
        optimizer={"lr": 1e-2},
        schedule={"shape": "wsd"},
        checkpoint={"every": 10, "keep_last": 20, "hot_steps": 10},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return Path(run_json("train", tmp_path / "recipe.yaml", "--name", "stem")["run_dir"])


def _steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read_entries(Storage(str(run)).sub("history"))))


def _newest(run: Path) -> int:
    """Steps in the newest checkpoint; 0 where there is none."""
    return max(
        (commit.step for commit in list_commits(Storage(str(run)).sub("checkpoints"))), default=0
    )


def _assert_alike(child: Path, stem: Path) -> None:
    expected = _steps(stem)[AT:]
    assert [s["step"] for s in _steps(child)] == list(range(AT + 1, STEPS + 1))
    assert [s["digest"] for s in _steps(child)] == [s["digest"] for s in expected]
    losses = pytest.approx([s["loss"] for s in expected], rel=RELATIVE)
    assert [s["loss"] for s in _steps(child)] == losses
    assert audit(Storage(str(child))).problems == ()


@pytest.mark.matrix  # three launches
def test_a_killed_driver_of_a_fork_resumes_at_another_size(stem: Path, tmp_path: Path) -> None:
    child = stem.with_name("child")
    fork = start("fork", f"{stem}@{AT}", "--name", "child", *TWO, log=tmp_path / "log")
    wait_until(lambda: _newest(child) > AT, 300, "a checkpoint of its own")
    kill_group(fork)
    result = run_json("train", "--resume", child, "workers.min=1", "workers.max=1")
    assert result["world_sizes"] == [2, 1]
    _assert_alike(child, stem)
