"""A run of short steps, with few durable checkpoints and many copies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.synthetic import tiny_recipe, write_data_set

HOT_STEPS = 10
CPUS = 1
"""What each worker claims."""
_SAMPLES = {"web": 1200, "code": 500, "books": 300}


def write_recipe(
    folder: Path,
    *,
    steps: int,
    mixed: bool = False,
    stay: bool = True,
    hang_seconds: int = 10,
    lr: float | None = None,
) -> Path:
    """Writes a data set and a recipe for 1 to 3 workers into `folder`; returns the recipe's file.

    It looks every second whether it can grow. `mixed`: three data sets, whose shares change evenly
    in the second half. `stay`, `hang_seconds`: as `workers.stay` and `workers.hang_seconds`. `lr`:
    by default so small that the loss is not yet close to 0 at the end.
    """
    if not mixed:
        write_data_set(folder / "data", samples=2000)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=steps,
        optimizer={"lr": lr or 1.5 / steps},
        checkpoint={"every": 200, "hot_steps": HOT_STEPS, "hot_bytes": 2**26},
    )
    values["workers"] |= {"max": 3, "cpus": CPUS, "spares": True}
    values["workers"] |= {"resize_seconds": 1, "hang_seconds": hang_seconds, "stay": stay}
    if mixed:
        values |= _mixture(folder / "data", steps)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder / "recipe.yaml"


def _mixture(folder: Path, steps: int) -> dict[str, Any]:
    """Three data sets, read in two phases; in the second the first gives way to the last."""
    for seed, (name, samples) in enumerate(_SAMPLES.items()):
        write_data_set(folder / name, samples=samples, seed=seed)
    first, last = (dict(zip(_SAMPLES, weights, strict=True)) for weights in ((6, 3, 1), (1, 3, 6)))
    changing = [
        {"name": name, "weight": first[name], "final_weight": last[name]} for name in _SAMPLES
    ]
    still = [{"name": name, "weight": weight} for name, weight in first.items()]
    half = steps // 2
    return {
        "steps": None,
        "data": {"path": str(folder), "sources": still},
        "phases": [
            {"name": "broad", "steps": half},
            {"name": "changing", "steps": steps - half, "data": {"sources": changing}},
        ],
    }
