"""The outline of a run's recipe: its order and its phases, found without reading it as a whole.

So a run can be looked at where its workload is not installed, and whatever else its recipe says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import ValidationError

from elastrata.runs.folder import RECIPE_FILE
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


def outline(run: Storage) -> list[PhaseOutline]:
    """The phases of a run, by the recipe in its folder; a single one where it has none.

    Raises:
        UserError: the recipe is missing or damaged.
    """
    try:
        recipe = yaml.safe_load(run.read(RECIPE_FILE))
        return [_phase(part, recipe["seed"]) for part in recipe.get("phases") or [recipe]]
    except FileNotFoundError:
        raise UserError(f"{run.uri(RECIPE_FILE)}: missing") from None
    except (
        yaml.YAMLError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        ValidationError,
    ) as error:
        raise UserError(f"{run.uri(RECIPE_FILE)}: damaged: {error!r}") from None


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
