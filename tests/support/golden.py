"""Short runs whose results must not change while the code is moved, renamed and taken out.

`python tests/support/golden.py` prints the results; `tests/data/golden.json` has those of the last
change of behaviour that was meant.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS, STOP = 6, 3
GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 2, "num_heads": 2, "embedding_multiple": 2}
SPARSE = {"optimizer": {"lr": 1e-3}, "sparsity": {"level": 0.5}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "two": (2, {}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}}),
    "all axes": (8, {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}}),
    "sparse": (2, SPARSE),
    "lamb": (1, {"optimizer": {"name": "lamb", "lr": 1e-2}}),
    "muon": (2, {"optimizer": {"name": "muon", "lr": 1e-2}}),
    "bucketwise": (2, {"clip": {"method": "bucketwise", "max_norm": 0.1}}),
}
"""By name the ranks and the keys that differ."""


def results() -> dict[str, list[list[Any]]]:
    """Return by case the digest and the loss of every step."""
    from support.synthetic import write_data_set

    with TemporaryDirectory() as folder:
        root = Path(folder)
        write_data_set(root / "data", samples=300, held_out=40)
        write_data_set(root / "other", samples=200, seed=7, held_out=40)
        return {**_by_layout(root), **_alone(root)}


def _by_layout(root: Path) -> dict[str, list[list[Any]]]:
    from support.bare_loop import train_on_ranks
    from support.ranks import run_fresh_ranks
    from support.synthetic import MODERNBERT, SEQ_LEN, tiny_recipe

    bert: dict[str, Any] = {"name": "bert", "hidden_size": 32, "num_layers": 2, "num_heads": 2}
    bert["embedding_multiple"] = 2
    gpt = {**GPT, "max_positions": SEQ_LEN}
    workloads = {"bert": bert, "gpt": gpt, "modernbert": {**MODERNBERT, "embedding_multiple": 2}}
    found = {}
    for workload, sizes in workloads.items():
        for name, (ranks, changes) in LAYOUTS.items():
            keys = {"workload": sizes, "steps": STEPS, **changes}
            values = tiny_recipe(root / "data", root / "runs", **keys)
            records = run_fresh_ranks(ranks, train_on_ranks, values)[0]
            found[f"{workload} {name}"] = [[one.digest, one.loss] for one in records]
    return found


def _alone(root: Path) -> dict[str, list[list[Any]]]:
    """Return what a lone process does: killed and continued, forked, begun with weights, mixed."""
    from elastrata.driver.fork import plan_fork
    from elastrata.run import history
    from elastrata.run.fork import begin_fork
    from elastrata_pipelines.storage import Storage
    from support.lone_run import lone_run, train_alone
    from support.synthetic import SEQ_LEN

    often = {
        "checkpoint": {"every": STOP, "keep_last": 9},
        "evaluation": {"every": STOP, "samples": 32},
    }
    gpt = {"workload": {**GPT, "max_positions": SEQ_LEN}, **often}
    sources = [{"name": name, "weight": 1} for name in ("data", "other")]

    def steps(run: Path) -> list[list[Any]]:
        entries = history.read_entries(Storage(str(run)).sub("history"))
        return [[step["digest"], step["loss"]] for step in history.effective_steps(entries)]

    runs = {"stem": lone_run(root, "stem", steps=STEPS, **gpt)}
    plan = plan_fork(f"{runs['stem']}@{STOP}", "forked", ["optimizer.lr=2e-3"])
    begin_fork(plan.fork)
    runs["forked"] = train_alone(plan.fork.recipe, Path(plan.fork.run.uri()))
    weights = {**gpt, "begin_with": str(runs["stem"])}
    runs["begun with weights"] = lone_run(root, "begun", steps=STEPS, **weights)
    mixed = {"path": str(root), "sources": sources, "window_stripes": 4}
    runs["mixed"] = lone_run(root, "mixed", steps=STEPS, data=mixed, **often)
    runs["two phases"] = lone_run(
        root,
        "phased",
        steps=None,
        phases=[{"steps": STOP}, {"steps": STOP, "batch_size": 15}],
        **often,
    )
    return {name: steps(run) for name, run in runs.items()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    print(json.dumps(results(), indent=1))
