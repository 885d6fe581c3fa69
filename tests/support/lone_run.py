"""A finished run, trained in this process, in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.trial import LoneTrial
from elastrata_pipelines.storage import Storage
from support.synthetic import tiny_recipe, write_data_set

STEPS, EVERY = 4, 2


def lone_run(folder: Path, name: str = "run", **changes: Any) -> Path:
    """Trains a tiny model; returns the run's folder, `folder/runs/NAME`.

    The run has evaluations and checkpoints after steps 2 and 4. Its data set, `folder/data`, which
    is made where it is missing, has no tokenizer.
    """
    data = folder / "data"
    if not data.exists():
        write_data_set(data, samples=300, held_out=40)
    kept = {"every": EVERY, "keep_last": 9}
    evaluation = {"every": EVERY, "samples": 32}
    values = tiny_recipe(
        data, folder / "runs", steps=STEPS, checkpoint=kept, evaluation=evaluation, name=name
    )
    recipe = Recipe.model_validate({**values, **changes})
    return train_alone(recipe, folder / "runs" / name)


def train_alone(recipe: Recipe, run: Path) -> Path:
    """Train a new run, or an interrupted one, to its end; return its folder.

    It waits for a checkpoint after every evaluation: on a busy machine one that is not complete
    when the next is due would put that off, and the run would have fewer checkpoints.
    """
    threads = torch.get_num_threads()
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(run)))
        while trial.report().state == "running":
            trial.save()
        trial.close()
    torch.set_num_threads(threads)
    return run
