"""A run that is trained in this process alone: one thread, no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from elastrata.core.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.lone_trial import LoneTrial
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.storage import Storage

Phases = tuple[Phase, ...]


def trained_alone(
    recipe: Recipe, folder: Path, change: Callable[[Phases], Phases] | None = None
) -> Path:
    """Trains a run to its end, unless that is done; returns its folder.

    Args:
        recipe: of the run, with held-out data.
        folder: of the run; beside it lies a mark of the end.
        change: what is read in the place of the recipe's phases, of equally many steps and samples.
    """
    done = folder.with_name(f"{folder.name}.done")
    if done.exists():
        return folder
    with lone_group(torch.device("cpu")):
        trial = LoneTrial(recipe, Storage(str(folder)))
        if change:
            trial._phases = change(trial._phases)
        while (report := trial.report()).state == "running":
            print(f"{folder.name}: step {report.step}: {report.metrics}", flush=True)
        trial.close()
    done.touch()
    return folder
