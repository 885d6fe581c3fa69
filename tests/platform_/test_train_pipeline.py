"""A model whose stages two workers have between them, through the real Ray Train."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.bare_loop import train_on_ranks
from support.command import kill_group, run
from support.live_run import LiveRun
from support.nodes import send, workers_of
from support.ranks import run_ranks
from support.synthetic import MODERNBERT, SEQ_LEN, tiny_recipe, write_data_set

STEPS, HOT_STEPS = 80, 10
RELATIVE = 1e-5
"""fp32 sums in another order."""
GPT = {
    "name": "gpt",
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 2,
    "max_positions": SEQ_LEN,
}
PIPELINE = ("workers.min=2", "workers.max=2", "parallel.pipeline=2")


@pytest.mark.matrix
@pytest.mark.parametrize("workload", [GPT, MODERNBERT], ids=["gpt", "modernbert"])
def test_a_worker_killed_and_continued_by_one_it_is_the_same_run(
    workload: dict[str, Any], tmp_path: Path, workers_are_children: None
) -> None:
    write_data_set(tmp_path / "data", samples=400)
    values = tiny_recipe(
        tmp_path / "data",
        tmp_path / "runs",
        workload=workload,
        steps=STEPS,
        checkpoint={"every": 10, "hot_steps": HOT_STEPS},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    live = LiveRun(recipe, "stages", tmp_path / "log", *PIPELINE)
    live.wait_for_group(1, steps=12)
    send(workers_of(live.driver.pid)[-1], signal.SIGKILL)
    live.wait_for_group(2, steps=12)
    assert "  bubble " in live.output
    kill_group(live.driver)

    alone = run("train", recipe, "--name", "stages")

    assert alone.returncode == 0, alone.stderr
    steps, wanted = live.steps(), run_ranks(1, train_on_ranks, values)[0]
    started = live.of_kind("started")
    assert [entry["world_size"] for entry in started] == [2, 2, 1]
    assert [entry["state"] for entry in started] == ["new", "hot", "durable"]
    assert live.rolled_back()[0] <= HOT_STEPS
    assert [s["digest"] for s in steps] == [r.digest for r in wanted]
    assert [s["loss"] for s in steps] == pytest.approx([r.loss for r in wanted], rel=RELATIVE)
