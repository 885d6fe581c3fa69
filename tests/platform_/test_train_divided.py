"""A model that two workers compute together, through the real Ray Train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from elastrata.checkpoints.commit import commits
from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_on_ranks
from support.command import kill_group, run, start, wait_until
from support.ranks import run_ranks
from support.synthetic import MODERNBERT, tiny_recipe, write_data_set

STEPS = 60
DIVIDED = ("workers.min=2", "workers.max=2", "parallel.tensor=2", "parallel.sequence=true")
RELATIVE = 1e-4
"""As in `test_train_choices.py`."""


@pytest.mark.matrix
@pytest.mark.parametrize("changes", [{}, {"workload": MODERNBERT}], ids=["bert", "modernbert"])
def test_killed_and_continued_by_one_worker_it_is_the_same_run(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    write_data_set(tmp_path / "data", samples=400)
    values = tiny_recipe(
        tmp_path / "data", tmp_path / "runs", steps=STEPS, checkpoint={"every": 10}, **changes
    )
    recipe = tmp_path / "divided.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    folder = tmp_path / "runs" / "divided"
    checkpoints = Storage(str(folder / "checkpoints"))
    divided = start("train", recipe, *DIVIDED, log=tmp_path / "log")
    wait_until(lambda: commits(checkpoints), 300, "a checkpoint")
    kill_group(divided)

    alone = run("train", recipe)

    assert alone.returncode == 0, alone.stderr
    entries = history.read(Storage(str(folder / "history")))
    steps, wanted = history.effective_steps(entries), run_ranks(1, train_on_ranks, values)[0]
    assert history.world_sizes(entries) == [2, 1]
    assert 0 < [e["step"] for e in entries if e["kind"] == "started"][1] < STEPS
    assert [s["digest"] for s in steps] == [r.digest for r in wanted]
    assert [s["tokens"] for s in steps] == [r.tokens for r in wanted]
    assert [s["loss"] for s in steps] == pytest.approx([r.loss for r in wanted], rel=RELATIVE)
