"""A run that is trained in this process alone: one thread, no Ray."""

from __future__ import annotations

from pathlib import Path

import torch

from elastrata.core.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.trial import LoneTrial
from elastrata_pipelines.storage import Storage


def trained_alone(recipe: Recipe, folder: Path) -> Path:
    """Trains a run to its end, unless that is done; returns its folder.

    Args:
        recipe: of the run, with held-out data.
        folder: of the run; beside it lies a mark of the end.
    """
    done = folder.with_name(f"{folder.name}.done")
    if done.exists():
        return folder
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(folder)))
        while (report := trial.report()).state == "running":
            print(f"{folder.name}: step {report.step}: {report.metrics}", flush=True)
        trial.close()
    done.touch()
    return folder
