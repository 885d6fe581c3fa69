"""The sweep: which values of a recipe are tried, and how the best of them are found."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from elastrata.config import Config
from elastrata.sweeps.domains import Domain
from elastrata.sweeps.schedulers import NoneConfig, SchedulerConfig
from elastrata.sweeps.searchers import RandomConfig, SearcherConfig


class SweepConfig(Config):
    """Many trials of one recipe, each with values of its own for some of its keys."""

    name: str | None = None
    """The sweep's name and its folder's; the same name continues the same sweep. Default: the
    file's name."""
    recipe: str
    """The recipe that is trained: a file, or a name such as `bert/tiny`."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Values of the recipe that all trials have instead, by dotted key: `steps: 400`."""
    space: Annotated[dict[str, Domain], Field(min_length=1, max_length=200)]
    """By dotted key of the recipe the values to try."""
    metric: str = "eval/loss"
    """The metric of the recipe's evaluations that trials are compared by."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value of the metric is the best."""
    searcher: SearcherConfig = RandomConfig()
    """How points are chosen."""
    scheduler: SchedulerConfig = NoneConfig()
    """Which trials are stopped early."""
    trials: Annotated[int, Field(gt=0, le=10**6)] = 16
    """How many points are tried."""
    concurrency: Annotated[int, Field(gt=0, le=100_000)] | Literal["auto"] = "auto"
    """Trials at a time; `auto`: so many that every worker has a GPU or, without any, a CPU."""
    max_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Ends the sweep so long after its launch, with the best there is. Default: no end."""
    max_failures: Annotated[int, Field(ge=0, le=10**6)] = 2
    """How often a trial whose process died is tried again, from its newest checkpoint."""
    keep: Literal["best", "all"] = "best"
    """Which trials keep their checkpoints when they are over: the best so far, or all."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("expected letters, digits, '.', '_' and '-': it names a folder")
        return name


def sweep_schema() -> dict[str, Any]:
    """The schema of a sweep file. Which keys a recipe has is not in it: the command checks them."""
    from elastrata.recipe.json_schema import extending_schema  # imports torch

    base = "A sweep's file; this one says only what is different."
    schema = extending_schema("Sweep", SweepConfig.model_json_schema(), base)
    return {**schema, "title": "Elastrata sweep"}
