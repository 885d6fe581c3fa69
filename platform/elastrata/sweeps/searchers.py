"""The searchers of a sweep: who says which point is tried next."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from elastrata.config import Config
from elastrata.sweeps.domains import Choice, Domain, Int, LogUniform, Uniform, Value
from elastrata.sweeps.space import Point, draw, grid_points

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


class HyperoptConfig(Config):
    """Hyperopt's tree-structured Parzen estimator. Needs the package hyperopt."""

    name: Literal["hyperopt"]
    """This searcher."""
    seed: Seed = 0
    """Equal seeds and results propose equal points."""
    startup_trials: Annotated[int, Field(ge=0, le=10**6)] = 8
    """So many points are drawn at random first."""


class NevergradConfig(Config):
    """Nevergrad's differential evolution with two-point crossover. Needs the package nevergrad."""

    name: Literal["nevergrad"]
    """This searcher."""
    seed: Seed = 0
    """Equal seeds and results propose equal points."""


SearcherConfig = Annotated[
    RandomConfig | GridConfig | OptunaConfig | HyperoptConfig | NevergradConfig,
    Field(discriminator="name"),
]
"""One of the searchers."""
_OF_THEIR_OWN = (RandomConfig, GridConfig)
"""Searchers that need no package; the others are called as theirs."""


def missing_package(config: SearcherConfig) -> str | None:
    """The package that a searcher needs and that is not installed."""
    if isinstance(config, _OF_THEIR_OWN) or importlib.util.find_spec(config.name):
        return None
    return config.name


def build_searcher(
    config: SearcherConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    """Ray Tune's searcher, with the points of `space`.

    Its answers depend on the seed and on what it was told, and on the order of both alone.
    """
    match config:
        case OptunaConfig():
            return _optuna(config, space, metric=metric, mode=mode)
        case HyperoptConfig():
            return _pruned(_hyperopt(config, space, metric=metric, mode=mode), space)
        case NevergradConfig():
            return _pruned(_nevergrad(config, space, metric=metric, mode=mode), space)
        case GridConfig():
            return _listed(grid_points(space), metric=metric, mode=mode)
    return _listed(_random(config, space), metric=metric, mode=mode)


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


def _hyperopt(
    config: HyperoptConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    from ray.tune.search.hyperopt import HyperOptSearch

    return HyperOptSearch(
        HyperOptSearch.convert_search_space(_tunes(space)),
        metric=metric,
        mode=mode,
        n_initial_points=config.startup_trials,
        random_state_seed=config.seed,
    )


def _nevergrad(
    config: NevergradConfig, space: Mapping[str, Domain], *, metric: str, mode: str
) -> Any:
    import nevergrad
    from ray.tune.search.nevergrad import NevergradSearch

    points: Any = NevergradSearch.convert_search_space(_tunes(space))
    points.random_state.seed(config.seed)
    optimizer = nevergrad.optimizers.registry["TwoPointsDE"]
    return NevergradSearch(optimizer, {"budget": None}, points, metric=metric, mode=mode)


def _tunes(space: Mapping[str, Domain]) -> dict[str, Any]:
    """Ray Tune's own words for the domains; it translates them for its searchers."""
    from ray import tune

    found: dict[str, Any] = {}
    for key, domain in space.items():
        match domain:
            case Uniform():
                found[key] = tune.uniform(*domain.uniform)
            case LogUniform():
                found[key] = tune.loguniform(*domain.loguniform)
            case Int():
                found[key] = tune.randint(domain.int[0], domain.int[1] + 1)
            case Choice():
                found[key] = tune.choice(list(domain.choice))
    return found


def _pruned(searcher: Any, space: Mapping[str, Domain]) -> Any:
    """A searcher that knows no conditions: it has a value for every key, and those that are not to
    be are left out."""
    suggest = searcher.suggest

    def pruned(trial_id: str) -> Any:
        whole = suggest(trial_id)
        return draw(space, lambda key, _: _plain(whole[key])) if whole else whole

    searcher.suggest = pruned
    return searcher


def _plain(value: Any) -> Value:
    """NumPy's numbers as Python's own: they go into the journal."""
    plain: Value = value.item() if hasattr(value, "item") else value
    return plain
