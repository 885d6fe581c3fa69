"""The outline of a run's recipe: its phases and its target, found without reading it as a whole.

So a run can be looked at where its workload is not installed, and whatever else its recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from elastrata.recipe.yaml_values import read_stored
from elastrata.runs.folder import RECIPE_FILE
from elastrata.training.target import TargetConfig
from elastrata_pipelines.batch_size_warmup import BatchSizeWarmup, samples_in
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class PhaseOutline:
    """What a phase of a run takes from its data set."""

    steps: int
    samples: int
    seed: int
    window_stripes: int


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What decides how far a run goes, and on which samples."""

    phases: tuple[PhaseOutline, ...]
    """A single one where the recipe has none."""
    target: TargetConfig | None
    """None where there is none, as in runs of old."""

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(phase.steps for phase in self.phases)


def read_outline(run: Storage) -> Outline:
    """That of the recipe in a run's folder.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    damage = (AttributeError, KeyError, TypeError, ValueError, OverflowError, ValidationError)
    try:
        recipe = read_stored(run, RECIPE_FILE)
        target = recipe.get("target")
        return Outline(
            phases=tuple(_phase(part, recipe["seed"]) for part in recipe.get("phases") or [recipe]),
            target=None if target is None else TargetConfig.model_validate(target),
        )
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    except damage as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"{run.uri(RECIPE_FILE)}: damaged: {type(error).__name__}: {line}"
        ) from None


def _phase(part: Mapping[str, Any], seed: int) -> PhaseOutline:
    warmup = part.get("batch_size_warmup")
    steps = int(part["steps"])
    return PhaseOutline(
        steps=steps,
        samples=samples_in(
            steps,
            full=int(part["batch_size"]),
            warmup=BatchSizeWarmup.model_validate(warmup) if warmup else None,
        ),
        seed=int(seed),
        window_stripes=int(part["data"]["window_stripes"]),
    )
