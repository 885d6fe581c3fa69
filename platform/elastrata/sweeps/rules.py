"""The rules of a sweep: what cannot work, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elastrata.core.evaluate import evaluation_metrics
from elastrata.core.workload import Workload
from elastrata.recipe.problems import shown_value
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.value_types import known_paths
from elastrata.sweeps.schedulers import NoneConfig, PbtConfig
from elastrata.sweeps.searchers import GridConfig, RandomConfig, missing_package
from elastrata.sweeps.space import condition_problems, reaching
from elastrata.sweeps.sweep import SweepConfig
from elastrata.sweeps.trial_recipe import BaseRecipe
from elastrata_pipelines.errors import UserError, nearest

SWEEPS_OWN = ("name", "storage", "tracking", "workers", "checkpoint", "phases")
"""Sections of a recipe that a sweep decides on, or that are the same in all trials."""
_LEAST_POPULATION = 2
_MOST_POINTS = 1_000_000
PBT_MAY_CHANGE = ("optimizer", "clip", "schedule")
"""What a run may go on with another value of."""


def sweep_problems(config: SweepConfig, base: BaseRecipe) -> list[str]:
    """A line for each thing that is wrong, without the file it stands in."""
    found = [
        *key_problems(config.space, base.recipe),
        *metric_problems(config.metric, base.recipe.workload),
        *_bounds(config),
        *(f"space.{key}: {line}" for key, line in condition_problems(config.space)),
        *_searcher(config),
        *_scheduler(config, base.recipe),
    ]
    return found or [*_values(config, base)]


def key_problems(keys: Iterable[str], recipe: Recipe) -> Iterator[str]:
    """What is wrong with the keys of a space: unknown ones, and those that are not to be tried."""
    known = {".".join(path) for path in known_paths(type(recipe))}
    known |= {f"workload.{'.'.join(path)}" for path in known_paths(type(recipe.workload))}
    for key in keys:
        bare, _, last = key.rpartition(".")
        if key.split(".")[0] in SWEEPS_OWN:
            yield f"space.{key}: is the same in all trials of a sweep"
        elif key not in known and not (last.isdigit() and bare in known):
            yield f"space.{key}: unknown key of the recipe{_meant(key, known)}"


def metric_problems(metric: str, workload: Workload) -> Iterator[str]:
    """What is wrong with the metric of a sweep."""
    reported = evaluation_metrics(workload)
    if metric not in reported:
        yield (
            f"metric: {metric!r}: the recipe never reports it; expected one of "
            f"{', '.join(reported)}{nearest(metric, reported)}"
        )


def _meant(key: str, known: Iterable[str]) -> str:
    """The key that an unknown one probably stands for."""
    same = sorted(path for path in known if path.rpartition(".")[2] == key.rpartition(".")[2])
    return f" (did you mean '{same[0]}'?)" if same else nearest(key, known)


def _bounds(config: SweepConfig) -> Iterator[str]:
    for key, domain in config.space.items():
        for line in domain.problems():
            yield f"space.{key}: {line}"


def _searcher(config: SweepConfig) -> Iterator[str]:
    if package := missing_package(config.searcher):
        yield (
            f"searcher.name: {config.searcher.name!r}: needs the package {package}; install it "
            f"with pip install {package}"
        )
    if isinstance(config.searcher, GridConfig):
        yield from _grid(config)


def _grid(config: SweepConfig) -> Iterator[str]:
    points = 1
    for key, domain in config.space.items():
        values = () if domain.problems() else domain.grid()
        if values is None:
            yield f"space.{key}.points: missing: a grid needs to know how many values"
        points *= len(values or (None,))
    if points > _MOST_POINTS:
        yield f"space: a grid of up to {points:,} points: expected at most {_MOST_POINTS:,}"


def _scheduler(config: SweepConfig, recipe: Recipe) -> Iterator[str]:
    if isinstance(config.scheduler, NoneConfig):
        return
    every, counted = recipe.evaluation.every, all(part.steps for part in recipe.parts)
    if every and counted and every >= (steps := recipe.steps_in_all):
        yield (
            f"changes.evaluation.every: {every}: expected fewer than steps ({steps}): scheduler "
            f"{config.scheduler.name!r} looks at trials after their evaluations"
        )
    if isinstance(config.scheduler, PbtConfig):
        yield from _population(config, recipe)


def _population(config: SweepConfig, recipe: Recipe) -> Iterator[str]:
    if config.trials < _LEAST_POPULATION:
        yield f"trials: {config.trials}: expected {_LEAST_POPULATION} or more with scheduler 'pbt'"
    if not isinstance(config.searcher, RandomConfig):
        yield f"searcher.name: {config.searcher.name!r}: expected 'random' with scheduler 'pbt'"
    if recipe.workers.most > 1:
        yield f"workers.max: {recipe.workers.most}: expected 1 with scheduler 'pbt'"
    for key, domain in config.space.items():
        if key.split(".")[0] not in PBT_MAY_CHANGE or key == "optimizer.name":
            yield (
                f"space.{key}: a run cannot go on with another value of it, as scheduler 'pbt' "
                f"wants; expected keys of {', '.join(PBT_MAY_CHANGE)}"
            )
        if domain.when:
            yield f"space.{key}.when: not possible with scheduler 'pbt'"


def _values(config: SweepConfig, base: BaseRecipe) -> Iterator[str]:
    """Values that the recipe does not take, tried one at a time beside those of the base."""
    for key, domain in config.space.items():
        for value in domain.extremes():
            try:
                base.trial({**reaching(config.space, key), key: value})
            except UserError as error:
                for line in error.problems:
                    yield f"space.{key}: {shown_value(value)}: {line}"
