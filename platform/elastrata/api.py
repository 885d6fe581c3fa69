"""The Python API of the commands: what `import elastrata` offers to notebooks."""

from __future__ import annotations

from collections.abc import Callable

from elastrata.launch.launch import TrainResult
from elastrata.launch.launch import train as train_on_ray
from elastrata.launch.ray_session import ray_session
from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.result import SweepResult
from elastrata.sweeps.standings import Standings
from elastrata.sweeps.sweep import SweepConfig
from elastrata.workers.events import Event
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation import prepare as prepare_on_ray


def run_name(recipe: Recipe) -> str:
    """The name of a recipe's run.

    Raises:
        UserError: it has none, as a recipe made in Python may.
    """
    if recipe.name is None:
        raise UserError("name: missing: expected the run's name; the same name continues it")
    return recipe.name


def train(
    recipe: Recipe,
    *,
    address: str | None = None,
    show: Callable[[Event], None] = lambda event: None,
    go_on_from: str | None = None,
) -> TrainResult:
    """Trains a recipe to its last step or its target, or continues its run where it stopped.

    Args:
        recipe: what to train, with a name.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: called with every event of the run, from a thread of its own.
        go_on_from: the checkpoint of the run to go back to: its folder's name, or its step.
            Default: the newest.

    Raises:
        UserError: the recipe, the data or the cluster cannot work; one line for each reason.
        TrainingError: training did not come to its end; says why.
    """
    return train_on_ray(
        recipe, name=run_name(recipe), address=address, show=show, go_on_from=go_on_from
    )


def prepare(
    config: PrepareConfig,
    out: str,
    *,
    overwrite: bool = False,
    address: str | None = None,
    progress: Callable[[str, int, int, str], None] | None = None,
) -> Manifest:
    """Turns text into a data set and returns its manifest.

    Args:
        config: which text, which tokenizer, how it becomes samples.
        out: folder or URL of the data set.
        overwrite: whether to replace a data set that is there.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        progress: called with stage, amount done, amount in all and their unit.

    Raises:
        UserError: text or configuration cannot work; one line for each reason.
    """
    with ray_session(address):
        return prepare_on_ray(config, out, overwrite=overwrite, progress=progress)


def sweep(
    config: SweepConfig,
    *,
    address: str | None = None,
    show: Callable[[Standings], None] | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Runs the trials of a sweep, or those that are left of the sweep of that name.

    Args:
        config: what is tried, with a name.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: called with the standings after everything that happens; default: in a notebook, a
            table that moves; else lines.
        warn: called, beside `show`, with one line about what went wrong and did not end the sweep.

    Raises:
        UserError: sweep, recipe, data or cluster cannot work; one line for each reason.
    """
    from rich.console import Console

    from elastrata.sweeps.launch import sweep as sweep_on_ray
    from elastrata.terminal.sweep_progress import SweepProgress

    if config.name is None:
        raise UserError("name: missing: expected the sweep's name; the same name continues it")
    if show is not None:
        return sweep_on_ray(config, name=config.name, address=address, show=show, warn=warn)
    with SweepProgress(config.space, Console()) as progress:
        return sweep_on_ray(
            config, name=config.name, address=address, show=progress, warn=progress.warn
        )
