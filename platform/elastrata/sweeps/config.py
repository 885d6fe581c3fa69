"""The configuration of a sweep: its keys, its file, and the checks before it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from elastrata.config import Config
from elastrata.recipe.problems import find_boolean_problems, format_value, recipe_problems
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.value_types import iter_key_paths
from elastrata.recipe.yaml_reader import Overrides, RecipeText, override_lines, read_recipe_text
from elastrata.recipe.yaml_values import parse_yaml
from elastrata.step.evaluate import evaluation_metrics
from elastrata.sweeps.scheduler import NoneConfig, PbtConfig, SchedulerConfig
from elastrata.sweeps.search import GridConfig, RandomConfig, SearcherConfig, missing_package
from elastrata.sweeps.space import Domain, activating_values, condition_problems
from elastrata.sweeps.trial_recipe import BaseRecipe, base_recipe
from elastrata_pipelines.errors import UserError, pluralize, suggest_nearest


class SweepConfig(Config):
    """Many trials of one recipe, with different values for some of its keys."""

    name: str | None = None
    """Name of the sweep and its folder; an existing sweep is resumed. Default: the file's name."""
    recipe: str
    """Recipe to train: a file, or a name such as `bert/tiny`."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Values that all trials change in the recipe, by dotted key: `steps: 400`."""
    space: Annotated[dict[str, Domain], Field(min_length=1, max_length=200)]
    """Values to try, by dotted key of the recipe."""
    metric: str = "eval/loss"
    """Evaluation metric by which trials are compared."""
    mode: Literal["min", "max"] = "min"
    """Whether the smallest (min) or largest (max) value is the best."""
    searcher: SearcherConfig = RandomConfig()
    """Method that chooses the points."""
    scheduler: SchedulerConfig = NoneConfig()
    """Method that stops trials early."""
    trials: Annotated[int, Field(gt=0, le=10**6)] = 16
    """Number of points to try."""
    concurrency: Annotated[int, Field(gt=0, le=100_000)] | Literal["auto"] = "auto"
    """Concurrent trials. auto: as many as have a GPU or, without any, a CPU per worker."""
    max_seconds: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds after its launch at which the sweep ends with the best result so far. Default: no
    limit."""
    max_failures: Annotated[int, Field(ge=0, le=10**6)] = 2
    """Retries of a trial whose process died, from its newest checkpoint."""
    keep: Literal["best", "all"] = "best"
    """Finished trials that keep their checkpoints: the best so far, or all."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("expected letters, digits, '.', '_' and '-': it names a folder")
        return name


def sweep_schema() -> dict[str, Any]:
    """Return the JSON Schema of a sweep file. It does not list the recipe's keys, which the command
    checks."""
    from elastrata.recipe.schema import extending_schema  # imports torch

    base = "File of the sweep that this one changes."
    schema = extending_schema("Sweep", SweepConfig.model_json_schema(), base)
    return {**schema, "title": "Elastrata sweep"}


def load_sweep(path: str, overrides: Overrides = ()) -> SweepConfig:
    """Read and check a sweep.

    Args:
        path: a YAML file. A relative recipe path in it is relative to this file's folder.
        overrides: changes by key, or `key=value` with the value in YAML. A key that the sweep does
            not have is a dotted key of the recipe and changes it for all trials.

    Returns:
        The sweep, for `sweep`.

    Raises:
        UserError: one line per mistake in the sweep, its recipe and its space.
    """
    text = _read_text(path, override_lines(overrides))
    # pydantic would take true and false as 1 and 0 for a number.
    misread = find_boolean_problems(SweepConfig, text)
    try:
        config = SweepConfig.model_validate(text.values)
    except ValidationError as error:
        problems = recipe_problems(error, SweepConfig, text)
        raise UserError(*problems, *misread, *_find_further_problems(text.values, path)) from None
    if misread:
        raise UserError(*misread, *_find_further_problems(text.values, path))
    check_sweep(config, path)
    return config


def check_sweep(config: SweepConfig, origin: str = "sweep") -> BaseRecipe:
    """Check a sweep before it starts, and return its base recipe.

    Args:
        config: the sweep.
        origin: prefix of the error lines, such as the sweep's file.

    Raises:
        UserError: one line per mistake.
    """
    base = base_recipe(config.recipe, config.changes)
    if problems := sweep_problems(config, base):
        raise UserError(*(f"{origin}: {line}" for line in problems))
    return base


def parse_changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse command-line overrides of the recipe's keys into values by dotted key.

    Raises:
        UserError: an override is not `key=value`.
    """
    changes = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"command line: {override}: expected key=value, such as trials=8")
        changes[key] = parse_yaml(value, f"command line: {key}: {value}", count_lines=False)
    return changes


def _read_text(path: str, overrides: Sequence[str]) -> RecipeText:
    """Read the file and apply each override to the sweep itself or to its `changes`."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such sweep file")
    sweep_overrides: list[str] = []
    recipe_overrides: list[str] = []
    for override in overrides:
        is_of_sweep = override.partition("=")[0].split(".")[0] in SweepConfig.model_fields
        (sweep_overrides if is_of_sweep else recipe_overrides).append(override)
    text = read_recipe_text(path, sweep_overrides, model=SweepConfig)
    # The file's name is the default name of the sweep.
    text.values.setdefault("name", text.name)
    changes = text.values.setdefault("changes", {})
    if isinstance(changes, dict):
        changes.update(parse_changes(recipe_overrides))
    recipe = text.values.get("recipe")
    # pathlib's is_file raises OSError for names that are too long.
    if isinstance(recipe, str) and os.path.isfile(recipe_path := Path(path).parent / recipe):  # noqa: PTH113
        text.values["recipe"] = str(recipe_path)
    return text


def _find_further_problems(values: Any, path: str) -> list[str]:
    """Find further mistakes in the recipe, space and metric of a sweep whose own keys are
    invalid."""
    recipe, changes = values.get("recipe"), values.get("changes")
    if not isinstance(recipe, str) or not isinstance(changes, dict):
        return []
    try:
        base = base_recipe(recipe, changes)
    except UserError as error:
        return list(error.problems)
    space, metric = values.get("space"), values.get("metric")
    lines = [*key_problems(space if isinstance(space, dict) else [], base.recipe)]
    if isinstance(metric, str):
        lines += metric_problems(metric, base.recipe)
    return [f"{path}: {line}" for line in lines]


FIXED_SECTIONS = ("name", "storage", "tracking", "workers", "checkpoint", "phases")
"""Sections of a recipe that the sweep sets, or that are the same in all trials."""
_LEAST_POPULATION = 2
_MOST_POINTS = 1_000_000
PBT_MAY_CHANGE = ("optimizer", "clip", "schedule")
"""Sections of a recipe that population based training can change in a run that continues."""


def sweep_problems(config: SweepConfig, base: BaseRecipe) -> list[str]:
    """Return a line per mistake, without the file's name."""
    problems = [
        *key_problems(config.space, base.recipe),
        *metric_problems(config.metric, base.recipe),
        *_domain_problems(config),
        *(f"space.{key}: {line}" for key, line in condition_problems(config.space)),
        *_searcher_problems(config),
        *_scheduler_problems(config, base.recipe),
    ]
    # Building trial recipes is only worthwhile, and only possible, with valid keys.
    return problems or [*_value_problems(config, base)]


def key_problems(keys: Iterable[str], recipe: Recipe) -> Iterator[str]:
    """Yield a line per key of the space that is unknown or must be the same in all trials."""
    known_keys = {".".join(path) for path in iter_key_paths(type(recipe))}
    known_keys |= {f"workload.{'.'.join(path)}" for path in iter_key_paths(type(recipe.workload))}
    for key in keys:
        parent, _, last = key.rpartition(".")
        if key.split(".")[0] in FIXED_SECTIONS:
            yield f"space.{key}: cannot differ between the trials of a sweep"
        # A trailing number is an index into a list, such as `optimizer.betas.1`.
        elif key not in known_keys and not (last.isdigit() and parent in known_keys):
            yield f"space.{key}: unknown key of the recipe{_suggest_key(key, known_keys)}"


def metric_problems(metric: str, recipe: Recipe) -> Iterator[str]:
    """Yield a line if the recipe's evaluations do not report the metric."""
    reported = evaluation_metrics(recipe.workload, recipe.evaluation.sets)
    if metric not in reported:
        yield (
            f"metric: {metric!r}: not reported by the recipe; expected one of "
            f"{', '.join(reported)}{suggest_nearest(metric, reported)}"
        )


def _suggest_key(key: str, known_keys: Iterable[str]) -> str:
    """Return a suggestion for an unknown key: one with the same last part, else a similar one."""
    same_ending = sorted(
        path for path in known_keys if path.rpartition(".")[2] == key.rpartition(".")[2]
    )
    return (
        f" (did you mean '{same_ending[0]}'?)" if same_ending else suggest_nearest(key, known_keys)
    )


def _domain_problems(config: SweepConfig) -> Iterator[str]:
    for key, domain in config.space.items():
        for line in domain.problems():
            yield f"space.{key}: {line}"


def _searcher_problems(config: SweepConfig) -> Iterator[str]:
    if package := missing_package(config.searcher):
        yield (
            f"searcher.name: {config.searcher.name!r}: needs the package {package}; install it "
            f"with pip install {package}"
        )
    if isinstance(config.searcher, GridConfig):
        yield from _grid_problems(config)


def _grid_problems(config: SweepConfig) -> Iterator[str]:
    points = 1
    for key, domain in config.space.items():
        # Invalid domains are reported by `_domain_problems`; here each counts as one value.
        values = () if domain.problems() else domain.grid()
        if values is None:
            yield f"space.{key}.points: missing: a grid needs a number of values"
        points *= len(values or (None,))
    if points > _MOST_POINTS:
        yield (
            f"space: a grid of up to {pluralize(points, 'point')}: expected at most "
            f"{_MOST_POINTS:,}"
        )


def _scheduler_problems(config: SweepConfig, recipe: Recipe) -> Iterator[str]:
    if isinstance(config.scheduler, NoneConfig):
        return
    # The number of steps of phases in epochs or tokens is unknown before the data is read.
    every, is_in_steps = recipe.evaluation.every, all(part.steps for part in recipe.parts)
    if every and is_in_steps and every >= (steps := recipe.steps_in_all):
        yield (
            f"changes.evaluation.every: {every}: expected fewer than steps ({steps}): scheduler "
            f"{config.scheduler.name!r} compares trials after their evaluations"
        )
    if isinstance(config.scheduler, PbtConfig):
        yield from _population_problems(config, recipe)


def _population_problems(config: SweepConfig, recipe: Recipe) -> Iterator[str]:
    if config.trials < _LEAST_POPULATION:
        yield f"trials: {config.trials}: expected {_LEAST_POPULATION} or more with scheduler 'pbt'"
    if not isinstance(config.searcher, RandomConfig):
        yield f"searcher.name: {config.searcher.name!r}: expected 'random' with scheduler 'pbt'"
    # States are copied between processes of one worker only.
    if recipe.workers.most > 1:
        yield f"workers.max: {recipe.workers.most}: expected 1 with scheduler 'pbt'"
    for key, domain in config.space.items():
        if key.split(".")[0] not in PBT_MAY_CHANGE or key == "optimizer.name":
            yield (
                f"space.{key}: scheduler 'pbt' cannot change it during a run; "
                f"expected keys of {', '.join(PBT_MAY_CHANGE)}"
            )
        if domain.when:
            yield f"space.{key}.when: not possible with scheduler 'pbt'"


def _value_problems(config: SweepConfig, base: BaseRecipe) -> Iterator[str]:
    """Yield a line per extreme value that the recipe rejects.

    Each value is tried alone, with all other keys as in the base, or as its conditions require.
    """
    for key, domain in config.space.items():
        for value in domain.extremes():
            try:
                base.trial({**activating_values(config.space, key), key: value})
            except UserError as error:
                for line in error.problems:
                    yield f"space.{key}: {format_value(value)}: {line}"
