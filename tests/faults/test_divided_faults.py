"""A model that workers compute in groups loses one of them, then a node, and gets another one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.bare_loop import train_on_ranks
from support.command import run_json
from support.live_run import LiveRun
from support.nodes import nodes, send, train_workers
from support.ranks import run_ranks
from support.synthetic import MODERNBERT, SEQ_LEN, tiny_recipe, write_data_set

STEPS, HOT_STEPS = 200, 10
PATIENCE = 400
"""Seconds: up to eight workers start on two cores."""
RELATIVE = 1e-5
"""fp32 sums in another order."""
GPT = {
    "name": "gpt",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "max_positions": SEQ_LEN,
    "embedding_multiple": 2,
}
CUBE = (
    "workers.min=4",
    "workers.max=8",
    "parallel.tensor=2",
    "parallel.pipeline=2",
    "parallel.sequence=true",
)
PAIRS = ("workers.min=2", "workers.max=4", "parallel.tensor=2", "parallel.sequence=true")


def _recipe(folder: Path, workload: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    write_data_set(folder / "data", samples=1000)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        workload=workload,
        steps=STEPS,
        optimizer={"lr": 1e-3},
        checkpoint={"every": 100, "hot_steps": HOT_STEPS},
        workers={"cpus": 1, "threads": 1, "spares": False, "resize_seconds": 1},
    )
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml", values


@pytest.mark.matrix
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("workload", "group", "layout"),
    [(GPT, 2, PAIRS), (GPT, 4, CUBE), (MODERNBERT, 2, PAIRS)],
    ids=["tp2", "pp2 tp2", "modernbert tp2"],
)
def test_a_lost_worker_and_a_lost_node_cost_a_few_steps(
    workload: dict[str, Any], group: int, layout: tuple[str, ...], tmp_path: Path
) -> None:
    recipe, values = _recipe(tmp_path, workload)
    with nodes() as cluster:
        cluster.add(cpus=group)
        second = cluster.add(cpus=group)
        live = LiveRun(recipe, "groups", tmp_path / "log", "--address", cluster.address, *layout)
        live.wait_for_group(1, steps=10, seconds=PATIENCE)
        send(train_workers(cluster.address)[-1], signal.SIGKILL)
        live.wait_for_group(2, steps=10, seconds=PATIENCE)
        cluster.kill(second)
        live.wait_for_group(3, steps=10, seconds=PATIENCE)
        cluster.add(cpus=group)
        live.wait_for_group(4, steps=10, seconds=PATIENCE)
        live.end(PATIENCE)
    steps, alone = live.steps(), run_ranks(1, train_on_ranks, values)[0]
    assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
    assert [s["digest"] for s in steps] == [r.digest for r in alone]
    assert [s["loss"] for s in steps] == pytest.approx([r.loss for r in alone], rel=RELATIVE)
    sizes = [entry["world_size"] for entry in live.of_kind("started")]
    assert (sizes[0], sizes[2], sizes[-1]) == (2 * group, group, 2 * group)
    assert set(sizes) == {group, 2 * group}
    assert len(live.of_kind("fault")) == 2
    assert all(lost <= HOT_STEPS for lost in live.rolled_back())
    audited = run_json("audit", recipe.parent / "runs" / "groups")
    assert audited["partition_ok"]
