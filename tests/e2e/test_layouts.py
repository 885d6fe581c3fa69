"""Tensor, pipeline and data parallelism together: the losses of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.bare_loop import train_on_ranks
from support.command import run_json
from support.ranks import run_ranks
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

STEPS = 20
LAYOUT = ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")
WHOLE = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.sequence=false")
RELATIVE = 1e-5
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""


def test_eight_workers_compute_the_losses_of_one_and_one_continues(tmp_path: Path) -> None:
    write_data_set(tmp_path / "data", samples=400)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": SEQ_LEN}
    values = tiny_recipe(
        tmp_path / "data",
        tmp_path / "runs",
        workload={"name": "gpt", "embedding_multiple": 2, **sizes},
        steps=STEPS,
        checkpoint={"every": 10},
        workers={"min": 8, "max": 8, "cpus": 0.2, "threads": 1, "spares": False},
    )
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")

    divided = run_json("train", recipe, *LAYOUT, "--name", "divided")

    assert (divided["status"], divided["world_sizes"]) == ("FINISHED", [8])
    entries = history.read_entries(Storage(str(tmp_path / "runs" / "divided" / "history")))
    steps = list(history.effective_steps(entries))
    wanted = run_ranks(1, train_on_ranks, values)[0]
    assert [s["digest"] for s in steps] == [r.digest for r in wanted]
    assert [s["loss"] for s in steps] == pytest.approx([r.loss for r in wanted], rel=RELATIVE)

    # The checkpoint of 2 x 2 x 2 workers loads into one.
    alone = ("steps=30", "workers.min=1", "workers.max=1", *WHOLE)
    forked = run_json("fork", tmp_path / "runs" / "divided@20", *alone, "--name", "alone")
    assert (forked["steps"], forked["world_sizes"]) == (30, [1])
