"""A phase of a recipe: consecutive steps on one data set, with one schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from elastrata.config import Config
from elastrata.core.optimizer import OptimizerConfig
from elastrata.core.schedule import ScheduleConfig
from elastrata.core.sparsity.config import SparsityConfig
from elastrata.recipe.alternatives import merged
from elastrata.recipe.data import DataConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.groups import BatchSizeWarmup

LENGTHS = ("steps", "epochs", "tokens")
"""The keys that say how long a phase is: one of them."""
PER_PHASE = (*LENGTHS, "batch_size_warmup")
"""The keys that, where all phases have their own, are none of the recipe as a whole."""
NO_LENGTH = f"steps: missing: expected {', '.join(LENGTHS[:-1])} or {LENGTHS[-1]}"


class PhaseKeys(Config):
    """The keys that may change while a run goes on, as planned from the start."""

    either: ClassVar = tuple((key,) for key in LENGTHS)

    data: DataConfig
    """The data that it trains on."""
    steps: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Optimizer steps; or give `epochs`, or `tokens`."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Length in passes over the data set, in place of `steps`, which are counted when the run
    begins. Not of a mixture, whose sources have their own."""
    tokens: Annotated[int, Field(gt=0, lt=2**62)] | None = None
    """Length in tokens, likewise: as many steps as have them by the mean length of a sample."""
    batch_size: Annotated[int, Field(gt=0, le=2**24)]
    """Samples per step, over all workers."""
    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller batches at first. The learning rate's schedule knows nothing of it."""
    micro_batch_tokens: Annotated[int, Field(gt=0, le=2**30)] | Literal["auto"] = 8192
    """Most tokens that one worker runs through the model at once. auto: what is fastest among what
    its memory has room for, by the plan (`elastrata plan`), corrected by what the first steps
    measure."""
    optimizer: OptimizerConfig
    """How weights are updated."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate moves."""
    sparsity: SparsityConfig = None
    """Weights that are held at zero. Default: none."""

    @property
    def num_steps(self) -> int:
        """Optimizer steps.

        Raises:
            UserError: they depend on a data set that is not prepared yet.
        """
        if self.steps is None:
            places = ", ".join(self.data.places.values())
            raise UserError(
                f"{self.length}: how many steps that is depends on {places}, which is not "
                "prepared yet; make it with `elastrata prepare`, or give steps"
            )
        return self.steps

    @property
    def length(self) -> str:
        """The key that says how long it is, and its value."""
        given = ((key, getattr(self, key)) for key in LENGTHS)
        return next((f"{key}: {value}" for key, value in given if value is not None), "steps: None")


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
