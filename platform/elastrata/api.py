"""Python API of the commands: the names that `import elastrata` offers to notebooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elastrata.driver.launch import train as train_on_ray
from elastrata.driver.ray_session import ray_session
from elastrata.driver.result import TrainResult
from elastrata.recipe.data_sets import resolve_steps
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import Overrides, override_lines
from elastrata.step.events import Event
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import Standings
from elastrata.sweeps.result import SweepResult
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation import prepare as prepare_on_ray
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from elastrata.inference.language_model import Continuation
    from elastrata.run.status import Status
    from elastrata_pipelines.inspection import Inspection


def run_name(recipe: Recipe) -> str:
    """Return the name of a recipe's run.

    Raises:
        UserError: the recipe has no name, which is possible if it was made in Python.
    """
    if recipe.name is None:
        raise UserError("name: missing: expected the run's name; an existing run is continued")
    return recipe.name


def train(
    recipe: Recipe | Mapping[str, Any] | str | os.PathLike[str],
    overrides: Overrides = (),
    *,
    address: str | None = None,
    show: Callable[[Event], None] | None = None,
    go_on_from: str | None = None,
) -> TrainResult:
    """Train a recipe to its last step or its target, or continue its run.

    Args:
        recipe: a YAML file, the name of a recipe such as `bert/tiny`, the keys and values of such a
            file, or a `Recipe`. The last two need a `name`, which is that of the run.
        overrides: changes of the recipe by dotted key, `{"optimizer.lr": 3e-4}`, or as on the
            command line, `["optimizer.lr=3e-4"]`. Not for a `Recipe`.
        address: Ray cluster to join, `auto` or HOST:PORT. Default: the open session, else a new
            cluster on this machine.
        show: called with every event of the run, from a background thread; default: print events,
            with a progress line in a terminal or notebook.
        go_on_from: checkpoint of the run to return to, by its folder's name or its step. Default:
            the newest.

    Returns:
        The finished run: its folder, steps, samples, tokens and final loss, with methods to export
        the model and to plot.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was saved first.
        UserError: recipe, data or cluster are invalid; one line per reason.
        TrainingError: training ended early, for the reason in its message.
    """
    from elastrata.terminal.console import open_console
    from elastrata.terminal.progress import Progress, phase_lines

    if not isinstance(recipe, Recipe):
        given = recipe if isinstance(recipe, Mapping) else os.fspath(recipe)
        recipe = load_recipe(given, overrides)
    elif overrides:
        raise UserError("overrides: not allowed with a Recipe: pass a file or a recipe's name")

    def run(recipe: Recipe, show: Callable[[Event], None]) -> TrainResult:
        return train_on_ray(recipe, name=name, address=address, show=show, go_on_from=go_on_from)

    name = run_name(recipe)
    if show is not None:
        return run(recipe, show)
    recipe = resolve_steps(recipe)
    with Progress(
        recipe.steps_in_all, open_console(as_json=False), phase_lines(recipe)
    ) as progress:
        return run(recipe, progress)


def fork(
    run: str,
    name: str,
    overrides: Overrides = (),
    *,
    address: str | None = None,
    show: Callable[[Event], None] | None = None,
) -> TrainResult:
    """Begin a new run from a checkpoint of another run and train it to its end.

    The parent run does not change.

    Args:
        run: `RUN@STEP`: the parent by its folder, URL or name, and the step of a checkpoint; or
            `RUN` for its newest checkpoint.
        name: name of the new run. It is stored next to its parent unless `storage` is changed.
        overrides: changes of the parent's recipe, as for `train`.
        address: Ray cluster to join; default: the open session, else a new local one.
        show: as for `train`; the default also prints all changes first.

    Returns:
        The finished new run, as for `train`.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was saved first.
        UserError: the checkpoint does not exist, or the changes are invalid; one line per reason.
            Nothing was started.
        TrainingError: training ended early, for the reason in its message.
    """
    from elastrata.driver.fork import plan_fork, show_changes
    from elastrata.run.fork import begin_fork
    from elastrata.terminal.console import open_console
    from elastrata.trainer.preflight import check_storage

    plan = plan_fork(run, name, override_lines(overrides))
    check_storage(Storage(plan.fork.recipe.storage))
    if show is None:
        show_changes(open_console(as_json=False), plan)
    begin_fork(plan.fork)
    return train(plan.fork.recipe, address=address, show=show)


def prepare(
    config: PrepareConfig,
    out: str,
    *,
    overwrite: bool = False,
    address: str | None = None,
    progress: Callable[[str, int, int, str], None] | None = None,
) -> Manifest:
    """Convert text to a data set.

    Ray is started after all checks.

    Args:
        config: sources of text, tokenizer, and format of the samples: the keys of `data.prepare`.
        out: folder or URL of the data set.
        overwrite: whether to replace an existing data set.
        address: Ray cluster to join; default: the open session, else a new local one.
        progress: called with stage, finished amount, total amount and their unit; default: print
            them.

    Returns:
        The manifest of the data set: samples, tokens, shards, vocabulary and fingerprint.

    Raises:
        UserError: text or configuration are invalid, or `out` holds something else; one line per
            reason.
    """
    from elastrata.terminal.console import open_console
    from elastrata.terminal.progress import StageProgress

    def run(report: Callable[[str, int, int, str], None]) -> Manifest:
        return prepare_on_ray(
            config,
            out,
            overwrite=overwrite,
            progress=report,
            session=lambda: ray_session(address),
        )

    if progress is not None:
        return run(progress)
    with StageProgress(open_console(as_json=False)) as stage_progress:
        return run(stage_progress)


def status(run: str) -> Status:
    """Return the status of a run, which may train anywhere.

    Args:
        run: its folder, its URL, or its name in `./runs`.

    Returns:
        The state, progress, loss, checkpoints, faults, recoveries and lost seconds.

    Raises:
        UserError: the run does not exist, or a file of it is damaged.
    """
    from elastrata.run.claim import find_run_folder
    from elastrata.run.status import status

    return status(find_run_folder(run))


def inspect(data: str, *, workers: int = 8, batch_size: int | None = None) -> Inspection:
    """Return lengths, padding and balance of a data set, as training would see it.

    Args:
        data: its folder or URL.
        workers: number of data-parallel workers that a batch would be dealt to.
        batch_size: samples of a step; default: 16 per worker, or all samples if there are fewer.

    Returns:
        The lengths in tokens, the share of padding, and the work of the slowest worker over the
        mean, for each scheme of dealing.

    Raises:
        UserError: the data set is missing or damaged.
    """
    from elastrata_pipelines.inspection import BERT_BASE_WORK, SAMPLES_OF_A_WORKER, inspect

    storage = Storage(data)
    manifest = Manifest.read(storage)
    return inspect(
        storage,
        workers=workers,
        batch_size=batch_size or min(SAMPLES_OF_A_WORKER * workers, manifest.samples),
        tokens_per_micro_batch=max(8192, manifest.seq_len),
        work=BERT_BASE_WORK,
    )


def generate(
    model: str,
    prompt: str,
    *,
    tokens: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    checkpoint: str = "newest",
) -> Continuation:
    """Continue a text with a trained GPT.

    Args:
        model: folder, URL or name of a run, or an exported folder.
        prompt: the text.
        tokens: largest number of added tokens.
        temperature: values below 1 favour likely tokens; 0 always chooses the likeliest.
        top_k: number of likeliest tokens to choose from; None: all.
        seed: equal seeds give equal texts.
        checkpoint: checkpoint of a run: `newest`, `best` (smallest evaluation loss), or a step.

    Returns:
        The added text, and its number of tokens.

    Raises:
        UserError: the model does not exist, or does not predict next tokens.
    """
    from elastrata.inference.language_model import Sampling, continue_text, load_language_model
    from elastrata.run.claim import find_model

    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    language_model = load_language_model(find_model(model), checkpoint=checkpoint)
    return continue_text(language_model, prompt, tokens=tokens, sampling=sampling)


def sweep(
    config: SweepConfig,
    *,
    address: str | None = None,
    show: Callable[[Standings], None] | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> SweepResult:
    """Run the trials of a sweep, or the remaining ones if the sweep already exists.

    Args:
        config: the sweep, with a name.
        address: Ray cluster to join; default: the open session, else a new local one.
        show: called with the standings after every change; default: print lines, or update a table
            in a notebook.
        warn: called, if `show` is given, with one line per problem that does not end the sweep.

    Returns:
        The result: the best trial with its values, the standings of all trials, and the report.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; the same sweep continues later.
        UserError: sweep, recipe, data or cluster are invalid; one line per reason.
    """
    from elastrata.sweeps.launch import sweep as sweep_on_ray
    from elastrata.terminal.console import open_console
    from elastrata.terminal.sweep_progress import SweepProgress

    if config.name is None:
        raise UserError("name: missing: expected the sweep's name; an existing sweep is continued")
    if show is not None:
        return sweep_on_ray(config, name=config.name, address=address, show=show, warn=warn)
    with SweepProgress(config.space, open_console(as_json=False)) as progress:
        return sweep_on_ray(
            config, name=config.name, address=address, show=progress, warn=progress.warn
        )
