"""The launch of a sweep: from the first check of its keys to its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

from elastrata.driver.interrupt import Interrupt
from elastrata.driver.ray_session import ray_session
from elastrata.recipe.data_sets import preparations, resolve_steps
from elastrata.recipe.recipe import Recipe
from elastrata.run.claim import TRIALS, check_folder, check_parent, claim
from elastrata.run.history import part_names
from elastrata.sweeps.config import SweepConfig, check_sweep
from elastrata.sweeps.driver import Show, SweepDriver, divide_cluster
from elastrata.sweeps.journal import Standings
from elastrata.sweeps.result import (
    SweepResult,
    check_same_sweep,
    read_journal,
    unknown_trials,
    write_sweep,
)
from elastrata.sweeps.search import GridConfig
from elastrata.sweeps.space import grid_points
from elastrata.sweeps.trial_recipe import TrialJob, with_absolute_paths
from elastrata.trainer.preflight import check_storage, find_training_data
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import count_samples
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.storage import Storage


def sweep(
    config: SweepConfig,
    *,
    name: str,
    address: str | None = None,
    show: Show = lambda standings: None,
    warn: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Run the trials of a sweep; if a sweep of that name exists, run its remaining trials.

    Args:
        config: the sweep.
        name: the sweep's name, and its folder's in the recipe's storage.
        address: the Ray cluster to join. Default: the open session, else a new local one.
        show: called with the standings after every event.
        warn: called with one line about a problem that does not end the sweep.

    Raises:
        UserError: the sweep, its recipe, the data or the cluster cannot be used.
    """
    began = time.monotonic()
    base = with_absolute_paths(check_sweep(config))
    root = Storage(base.recipe.storage)
    missing = _find_missing_data(base.recipe)
    if not missing:
        # Existing data is checked before Ray starts, which takes seconds.
        _estimate_trial_tokens(base.recipe)
    folder = root.sub(name)
    check_folder(folder, "sweep")
    check_parent(root)
    check_storage(root)
    interrupt = Interrupt()
    with _claim_folder(folder, interrupt, warn):
        check_same_sweep(folder, config, base.recipe)
        # Ray starts only after all checks that need no cluster.
        for line in check_journal(folder, config):
            warn(line)
        with ray_session(address):
            for path, preparation in missing.items():
                prepare(preparation, path)
            tokens = _estimate_trial_tokens(base.recipe)
            trials = _count_trials(config)
            shares = divide_cluster(
                base.recipe.workers, _resources(), config.concurrency, trials=trials
            )
            # Written only after all checks: a corrected sweep would be refused as another one.
            write_sweep(folder, config, base.recipe)
            job = TrialJob(
                base=base, folder=folder.sub(TRIALS), threads=shares.threads, metric=config.metric
            )
            driver = SweepDriver.begin(config, folder, job, interrupt, show, warn, _resources())
            status = driver.to_end(shares, trials, tokens, began)
    return SweepResult(
        name=name,
        folder=folder.uri(),
        mlflow_run_id=driver.record.whole.run_id,
        status=status,
        config=config,
        standings=driver.standings,
        seconds=time.monotonic() - began,
    )


@contextmanager
def _claim_folder(
    folder: Storage, interrupt: Interrupt, warn: Callable[[str], None]
) -> Iterator[None]:
    """Hold the claim on the sweep's folder during the block, so that it has one driver."""
    with claim(folder, "sweep", lost=interrupt.lose, warn=warn):
        yield


def check_journal(folder: Storage, config: SweepConfig) -> tuple[str, ...]:
    """Return a line for each part of the sweep that is damaged but does not prevent its
    continuation.

    Raises:
        UserError: the journal is unreadable, contradicts itself, or holds foreign parts.
    """
    journal = read_journal(folder)
    standings = Standings(config.metric, config.mode, journal.entries)
    # A trial without reports may have had no time to write its history.
    trials = [folder.sub(TRIALS, trial.id) for trial in standings.trials.values() if trial.reports]
    without_history = [trial for trial in trials if not part_names(trial.sub("history"))]
    return (
        *journal.problems,
        *unknown_trials(folder, standings),
        *(f"{trial.uri()}: the history is missing" for trial in without_history),
    )


def _resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _count_trials(config: SweepConfig) -> int:
    """Return the number of trials in all."""
    if isinstance(config.searcher, GridConfig):
        return sum(1 for _ in grid_points(config.space))
    return config.trials


def _find_missing_data(recipe: Recipe) -> dict[str, PrepareConfig]:
    """Return the preparation of each of the recipe's data sets that does not exist, by path.

    Raises:
        UserError: a data set is missing, and the recipe does not say how to prepare it.
    """
    missing = {place for part in recipe.parts for place in part.data.places.values()}
    missing = {path for path in missing if Manifest.find(Storage(path)) is None}
    if not missing:
        return {}
    return {path: how for path, how in preparations(recipe).items() if path in missing}


def _estimate_trial_tokens(recipe: Recipe) -> int:
    """Return the approximate number of tokens of a trial that runs to its end.

    Raises:
        UserError: a data set cannot be used, or has no held-out data by which to compare trials.
    """
    data = find_training_data(resolve_steps(recipe))
    if None in data.held_out:
        raise UserError(
            f"data.path: {recipe.parts[0].data.path}: has no held-out data, which is needed to "
            "compare trials; prepare with data.prepare.held_out, or give evaluation.path"
        )
    return sum(
        count_samples(phase.steps, full=phase.batch_size, warmup=phase.warmup)
        * max(1, int(phase.batches.tokens_per_sample))
        for phase in data.phases
    )
