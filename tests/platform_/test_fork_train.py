"""`elastrata fork` through the real Ray Train, at any number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli.main import run as run_here
from elastrata.run import history
from elastrata.run.audit import audit
from elastrata.run.folder import read_identity
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run

STEPS, AT = 24, 12
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run, over more than an epoch."""
    folder = tmp_path_factory.mktemp("forks")
    every = {"checkpoint": {"every": AT, "keep_last": 9}, "evaluation": {"every": AT}}
    schedule = {"shape": "wsd", "warmup_steps": 2}
    average = {"decay": 0.9}
    return lone_run(
        folder, "stem", saves=True, steps=STEPS, schedule=schedule, average=average, **every
    )


def steps(run: Path) -> list[Any]:
    return list(history.effective_steps(history.read(Storage(str(run)).sub("history"))))


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_it_does_the_steps_of_an_undisturbed_run(
    workers: int, stem: Path, ray_local: None, capsys: pytest.CaptureFixture[str]
) -> None:
    group = f"workers={{min: {workers}, max: {workers}, cpus: 0.4, threads: 1, spares: false}}"
    name = f"at-{workers}"
    assert run_here(["fork", f"{stem}@{AT}", "--name", name, group, "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    child, expected = stem.with_name(name), steps(stem)[AT:]
    assert result["run_dir"] == str(child)
    assert (result["steps"], result["world_sizes"]) == (STEPS, [workers])
    assert [s["digest"] for s in steps(child)] == [s["digest"] for s in expected]
    assert [s["tokens"] for s in steps(child)] == [s["tokens"] for s in expected]
    losses = pytest.approx([s["loss"] for s in expected], rel=RELATIVE)
    assert [s["loss"] for s in steps(child)] == losses
    found = audit(Storage(str(child)))
    assert (found.problems, found.inherited.state) == ((), "checked")
    _is_on_record(child, result["mlflow_run_id"])


def _is_on_record(child: Path, run_id: str) -> None:
    import mlflow

    identity = read_identity(Storage(str(child)))
    assert identity is not None
    assert identity.origin is not None
    record = mlflow.MlflowClient(f"sqlite:///{child.parent / 'mlflow.db'}").get_run(run_id)
    assert identity.origin.to_tags().items() <= record.data.tags.items()
