"""The searchers of a sweep: which point is tried next."""

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

Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""Searchers draw with NumPy, whose seeds are no larger."""


class RandomConfig(Config):
    """Points drawn at random, each for itself."""

    name: Literal["random"] = "random"
    """This searcher; the default."""
    seed: Seed = 0
    """Equal seeds draw equal points."""


class GridConfig(Config):
    """All points of a grid: `trials` does not count."""

    name: Literal["grid"]
    """This searcher."""


class OptunaConfig(Config):
    """Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011): points like the
    good ones so far. Needs the package optuna."""

    name: Literal["optuna"]
    """This searcher."""
    seed: Seed = 0
    """Equal seeds and results propose equal points."""
    startup_trials: Annotated[int, Field(ge=0, le=10**6)] = 8
    """So many points are drawn at random first."""


SearcherConfig = Annotated[
    RandomConfig | GridConfig | OptunaConfig,
    Field(discriminator="name"),
]
"""One of the searchers."""


def missing_package(config: SearcherConfig) -> str | None:
    """Return the package that a searcher needs and that is not installed."""
    is_there = not isinstance(config, OptunaConfig) or find_spec("optuna")
    return None if is_there else "optuna"


def build_searcher(
    config: SearcherConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    """Ray Tune's searcher, with the points of `space`.

    Its answers depend on the seed and on what it was told, and on the order of both alone.
    """
    match config:
        case OptunaConfig():
            return _optuna(config, space, metric=metric, mode=mode)
        case GridConfig():
            return _listed(grid_points(space), metric=metric, mode=mode)
    return _listed(_random(config, space), metric=metric, mode=mode)


def _random(config: RandomConfig, space: Mapping[str, Domain]) -> Iterator[Point]:
    rng = random.Random(config.seed)
    while True:
        yield draw(space, lambda _, domain: domain.value_at(rng.random()))


def _listed(points: Iterator[Point], *, metric: str, mode: str) -> Any:

    class Listed(Searcher):
        """Points that no result changes."""

        def suggest(self, trial_id: str) -> Any:
            return next(points, Searcher.FINISHED)

        def on_trial_complete(
            self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
        ) -> None:
            """Learns nothing."""

    return Listed(metric=metric, mode=mode)


def _optuna(config: OptunaConfig, space: Mapping[str, Domain], *, metric: str, mode: str) -> Any:
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def suggest(trial: Any) -> None:
        draw(space, lambda key, domain: _suggested(trial, key, domain))

    sampler = optuna.samplers.TPESampler(seed=config.seed, n_startup_trials=config.startup_trials)
    return OptunaSearch(suggest, metric=metric, mode=mode, sampler=sampler)


def _suggested(trial: Any, key: str, domain: Domain) -> Value:
    """Optuna's own word for a domain."""
    found: Value
    match domain:
        case Uniform():
            found = trial.suggest_float(key, *domain.uniform)
        case LogUniform():
            found = trial.suggest_float(key, *domain.loguniform, log=True)
        case Int():
            found = trial.suggest_int(key, *domain.int)
        case Choice():
            found = trial.suggest_categorical(key, domain.choice)
    return found
