"""The searchers of a sweep: they choose the next point."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field
from ray.tune.search import Searcher

from elastrata.config import Config
from elastrata.sweeps.space import (
    Choice,
    Domain,
    Int,
    LogUniform,
    Point,
    Uniform,
    Value,
    draw,
    grid_points,
)

# Optuna's sampler seeds NumPy, which accepts 32 bits.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class RandomConfig(Config):
    """Independent random points."""

    name: Literal["random"] = "random"
    """Random search, the default."""
    seed: Seed = 0
    """Seed of the points."""


class GridConfig(Config):
    """All points of a grid. `trials` is ignored."""

    name: Literal["grid"]
    """Grid search."""


class OptunaConfig(Config):
    """Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011), which prefers
    points similar to the good ones so far. Needs the package optuna."""

    name: Literal["optuna"]
    """Optuna's sampler."""
    seed: Seed = 0
    """Seed of the points, which also depend on the results."""
    startup_trials: Annotated[int, Field(ge=0, le=10**6)] = 8
    """Number of initial points that are chosen at random."""


SearcherConfig = Annotated[
    RandomConfig | GridConfig | OptunaConfig,
    Field(discriminator="name"),
]
"""Configuration of one of the searchers."""


def missing_package(config: SearcherConfig) -> str | None:
    """Return the package that a searcher needs if it is not installed, else None."""
    is_installed = not isinstance(config, OptunaConfig) or find_spec("optuna")
    return None if is_installed else "optuna"


def build_searcher(
    config: SearcherConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    """Return Ray Tune's searcher for the points of `space`.

    Its suggestions depend only on the seed, and on the results it has received and their order.
    """
    match config:
        case OptunaConfig():
            return _build_optuna(config, space, metric=metric, mode=mode)
        case GridConfig():
            return _build_listed(grid_points(space), metric=metric, mode=mode)
    return _build_listed(_random_points(config, space), metric=metric, mode=mode)


def _random_points(config: RandomConfig, space: Mapping[str, Domain]) -> Iterator[Point]:
    rng = random.Random(config.seed)
    while True:
        yield draw(space, lambda _, domain: domain.value_at(rng.random()))


def _build_listed(points: Iterator[Point], *, metric: str, mode: str) -> Any:

    class Listed(Searcher):
        """Searcher that suggests given points whatever the results are."""

        def suggest(self, trial_id: str) -> Any:
            return next(points, Searcher.FINISHED)

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            """Ignore the result."""

    return Listed(metric=metric, mode=mode)


def _build_optuna(
    config: OptunaConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    # Optuna otherwise logs every trial.
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def suggest(trial: Any) -> None:
        # Optuna samples inside this function, so that keys with conditions are only sampled when
        # active.
        draw(space, lambda key, domain: _suggest_value(trial, key, domain))

    # The seed makes suggestions repeatable, which the replay of the journal relies on.
    sampler = optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=config.startup_trials)
    return OptunaSearch(suggest, metric=metric, mode=mode, sampler=sampler)


def _suggest_value(trial: Any, key: str, domain: Domain) -> Value:
    """Ask an Optuna trial for a value of a domain."""
    value: Value
    match domain:
        case Uniform():
            value = trial.suggest_float(key, *domain.uniform)
        case LogUniform():
            value = trial.suggest_float(key, *domain.loguniform, log=True)
        case Int():
            value = trial.suggest_int(key, *domain.int)
        case Choice():
            value = trial.suggest_categorical(key, domain.choice)
    return value
