"""The searchers of a sweep: who says which point is tried next."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from elastrata.recipe.config import Config
from elastrata.sweeps.domains import Choice, Domain, Int, LogUniform, Uniform, Value
from elastrata.sweeps.space import Point, draw, grid_points


class RandomConfig(Config):
    """Points drawn at random, each for itself."""

    name: Literal["random"] = "random"
    """This searcher; the default."""
    seed: NonNegativeInt = 0
    """The same seed draws the same points."""


class GridConfig(Config):
    """All points of a grid: `trials` does not count."""

    name: Literal["grid"]
    """This searcher."""


class OptunaConfig(Config):
    """Optuna's tree-structured Parzen estimator (Bergstra et al., NeurIPS 2011): points like the
    good ones so far. Needs the package optuna."""

    name: Literal["optuna"]
    """This searcher."""
    seed: NonNegativeInt = 0
    """The same seed and the same results propose the same points."""
    startup_trials: NonNegativeInt = 8
    """So many points are drawn at random first."""


SearcherConfig = Annotated[RandomConfig | GridConfig | OptunaConfig, Field(discriminator="name")]
"""One of the searchers."""


def missing_package(config: SearcherConfig) -> str | None:
    """The package that a searcher needs and that is not installed."""
    needs = "optuna" if isinstance(config, OptunaConfig) else None
    return needs if needs and importlib.util.find_spec(needs) is None else None


def build_searcher(
    config: SearcherConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    """Ray Tune's searcher, with the points of `space`.

    Its answers depend on the seed and on what it was told, and on the order of both alone.
    """
    if isinstance(config, OptunaConfig):
        return _optuna(config, space, metric=metric, mode=mode)
    points = grid_points(space) if isinstance(config, GridConfig) else _random(config, space)
    return _listed(points, metric=metric, mode=mode)


def _random(config: RandomConfig, space: Mapping[str, Domain]) -> Iterator[Point]:
    rng = random.Random(config.seed)
    while True:
        yield draw(space, lambda _, domain: domain.value_at(rng.random()))


def _listed(points: Iterator[Point], *, metric: str, mode: str) -> Any:
    from ray.tune.search import Searcher

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
