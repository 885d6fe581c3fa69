"""The summary of a run's recipe: its phases and its target, found without reading it as a whole.

So a run can be looked at where its workload is not installed, and whatever else its recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastrata.core.target import TargetConfig
from elastrata.run.folder import RECIPE_FILE, number_of_sources, read_values
from elastrata_pipelines.batch_size_warmup import BatchSizeWarmup
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.phase import PhaseSize
from elastrata_pipelines.storage import Storage

_MOST = 2**64


@dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """The samples that a phase of a run takes from its data set, and their order."""

    size: PhaseSize
    seed: int
    window_stripes: int
    num_data_sets: int = 1
    """Its sources, where it has any."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The values that decide how far a run goes, and on which samples."""

    phases: tuple[PhaseSummary, ...]
    """A single one where the recipe has none."""
    target: TargetConfig | None
    """None where there is none, as in runs of old."""

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(phase.size.steps for phase in self.phases)


def read_summary(run: Storage) -> RunSummary:
    """That of the recipe in a run's folder.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    recipe = read_values(run, RECIPE_FILE)
    damage = (AttributeError, KeyError, TypeError, ValueError, OverflowError)
    try:
        target = recipe.get("target")
        return RunSummary(
            phases=tuple(_phase(part, recipe["seed"]) for part in recipe.get("phases") or [recipe]),
            target=None if target is None else TargetConfig.model_validate(target),
        )
    except damage as error:
        line = str(error).splitlines()[0]
        raise UserError(
            f"{run.uri(RECIPE_FILE)}: damaged: {type(error).__name__}: {line}"
        ) from None


def _phase(part: Mapping[str, Any], seed: int) -> PhaseSummary:
    warmup = part.get("batch_size_warmup")
    return PhaseSummary(
        size=PhaseSize(
            steps=_number(part, "steps", 1),
            batch_size=_number(part, "batch_size", 1),
            warmup=BatchSizeWarmup.model_validate(warmup) if warmup else None,
        ),
        seed=_number({"seed": seed}, "seed", -_MOST),
        window_stripes=_number(part["data"], "window_stripes", 1),
        num_data_sets=number_of_sources(part) or 1,
    )


def _number(section: Mapping[str, Any], key: str, least: int) -> int:
    """A whole number of a recipe.

    Raises:
        ValueError: it is none, or out of range.
    """
    value = section[key]
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{key}: {value!r}: expected a whole number from {least} to {_MOST}")
    return value
