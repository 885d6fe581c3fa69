"""A job: everything that the workers of a run are told."""

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
    """A value: it can be sent to any process."""

    recipe: Recipe
    run: Storage
    phases: tuple[Phase, ...]
    held_out: tuple[Mapping[str, Batches], ...]
    """For the evaluations in every phase, by name of the set."""
    channel: Any
    """Handle of the driver's channel."""
    replicas: Replicas | None
    """Where the copies in memory are kept; None: nowhere."""
    parent: Parent | None = None
    """The weights that it begins with, where it has no checkpoint; None: drawn ones."""
