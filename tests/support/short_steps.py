"""A run of short steps, with few durable checkpoints and many copies in memory."""

from __future__ import annotations

from pathlib import Path

import yaml

from support.synthetic import tiny_recipe, write_data_set

HOT_STEPS = 10
CPUS = 1
"""What each worker claims."""


def write_recipe(folder: Path, *, steps: int) -> Path:
    """Writes a data set and a recipe for 1 to 3 workers into `folder`; returns the recipe's file.

    It looks every second whether it can grow, and takes workers for hung after 10 s.
    """
    write_data_set(folder / "data", samples=2000)
    values = tiny_recipe(
        folder / "data",
        folder / "runs",
        steps=steps,
        optimizer={"lr": 1.5 / steps},  # so that the loss is not yet close to 0 at the end
        checkpoint={"every": 200, "hot_steps": HOT_STEPS, "hot_bytes": 2**26},
    )
    values["workers"] |= {"max": 3, "cpus": CPUS, "spares": True}
    values["workers"] |= {"resize_seconds": 1, "hang_seconds": 10}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"
