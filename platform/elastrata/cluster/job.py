"""A job: everything that the workers of a run receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastrata.checkpoints.replicas.replicas import Replicas
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Job:
    """Recipe, data and services of a run; can be sent to any process."""

    recipe: Recipe
    run: Storage
    phases: tuple[Phase, ...]
    held_out: tuple[Mapping[str, Batches], ...]
    """Evaluation data of every phase, by name of the set."""
    channel: Any
    """Handle of the control channel."""
    replicas: Replicas | None
    """Store of the in-memory checkpoints; None if they are off."""
    parent: Parent | None = None
    """Weights to begin with if the run has no checkpoint; None to initialise at random."""
