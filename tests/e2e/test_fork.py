"""A fork without changes takes the very steps that its parent took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.folder import read_identity
from elastrata_pipelines.storage import Storage
from support.command import run_json
from support.lone_run import lone_run

STEPS, AT = 24, 12
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


def steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read_entries(Storage(str(run)).sub("history"))))


def test_two_workers_continue_a_run_of_one(tmp_path: Path) -> None:
    """The run is longer than an epoch."""
    every = {"checkpoint": {"every": AT, "keep_last": 9}, "evaluation": {"every": AT}}
    schedule = {"shape": "wsd", "warmup_steps": 2}
    stem = lone_run(
        tmp_path,
        "stem",
        steps=STEPS,
        schedule=schedule,
        average={"decay": 0.9},
        **every,
    )
    group = "workers={min: 2, max: 2, cpus: 0.4, threads: 1, spares: false}"

    result = run_json("fork", f"{stem}@{AT}", "--name", "fork", group)

    fork, expected = stem.with_name("fork"), steps(stem)[AT:]
    assert result["run_dir"] == str(fork)
    assert (result["steps"], result["world_sizes"]) == (STEPS, [2])
    assert [s["digest"] for s in steps(fork)] == [s["digest"] for s in expected]
    assert [s["tokens"] for s in steps(fork)] == [s["tokens"] for s in expected]
    losses = pytest.approx([s["loss"] for s in expected], rel=RELATIVE)
    assert [s["loss"] for s in steps(fork)] == losses
    found = audit(Storage(str(fork)))
    assert (found.problems, found.inherited.state) == ((), "checked")
    _is_on_record(fork, result["mlflow_run_id"])


def _is_on_record(child: Path, run_id: str) -> None:
    import mlflow

    identity = read_identity(Storage(str(child)))
    assert identity is not None
    assert identity.origin is not None
    record = mlflow.MlflowClient(f"sqlite:///{child.parent / 'mlflow.db'}").get_run(run_id)
    assert identity.origin.to_tags().items() <= record.data.tags.items()
