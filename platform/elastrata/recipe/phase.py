"""A phase of a recipe: consecutive steps on one data set, with one schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from elastrata.recipe.alternatives import merged
from elastrata.recipe.config import Config
from elastrata.recipe.data import DataConfig
from elastrata.training.optimizer import OptimizerConfig
from elastrata.training.schedule import ScheduleConfig
from elastrata.training.sparsity.config import SparsityConfig
from elastrata_pipelines.batch_size_warmup import BatchSizeWarmup


class PhaseKeys(Config):
    """What may change while a run goes on, as it is planned from the start."""

    data: DataConfig
    steps: Annotated[int, Field(gt=0, le=10**9)]
    """Optimizer steps."""
    batch_size: Annotated[int, Field(gt=0, le=2**24)]
    """Samples per step, over all workers."""
    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller batches at first. The learning rate's schedule knows nothing of it."""
    micro_batch_tokens: Annotated[int, Field(gt=0, le=2**30)] | Literal["auto"] = 8192
    """Most tokens that one worker runs through the model at once. auto: what is fastest among what
    its memory has room for, by the plan (`elastrata plan`), corrected by what the first steps
    measure."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    sparsity: SparsityConfig = None
    """Weights that are held at zero. Default: none."""


class Phase(PhaseKeys):
    """One of several phases of a run. What it does not say is as the recipe says it."""

    name: str | None = None
    """For people."""


def with_inherited(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's values whose phases say all that they take from it.

    Args:
        recipe: as it was written; stays as it is.
    """
    phases = recipe.get("phases")
    if not isinstance(phases, Sequence) or isinstance(phases, str):
        return dict(recipe)
    common = {key: recipe[key] for key in PhaseKeys.model_fields if key in recipe}
    whole = [
        merged(Phase, common, phase) if isinstance(phase, Mapping) else phase for phase in phases
    ]
    return {**recipe, "phases": whole}
