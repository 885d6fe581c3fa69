"""The Python API of the commands: what `import elastrata` offers to notebooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from elastrata.driver.launch import train as train_on_ray
from elastrata.driver.ray_session import ray_session
from elastrata.driver.result import TrainResult
from elastrata.recipe.data_sets import in_steps
from elastrata.recipe.recipe import Recipe
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
    show: Callable[[Event], None] | None = None,
    go_on_from: str | None = None,
) -> TrainResult:
    """Trains a recipe to its last step or its target, or continues its run where it stopped.

    Args:
        recipe: what to train, with a name.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: called with every event of the run, from a thread of its own; default: shows them, in
            a line that moves where there is a terminal or a notebook.
        go_on_from: the checkpoint of the run to go back to: its folder's name, or its step.
            Default: the newest.

    Raises:
        UserError: the recipe, the data or the cluster cannot work; one line for each reason.
        TrainingError: training did not come to its end; says why.
    """
    from elastrata.terminal.console import open_console
    from elastrata.terminal.progress import Progress, phase_lines

    def run(recipe: Recipe, show: Callable[[Event], None]) -> TrainResult:
        return train_on_ray(recipe, name=name, address=address, show=show, go_on_from=go_on_from)

    name = run_name(recipe)
    if show is not None:
        return run(recipe, show)
    recipe = in_steps(recipe)
    with Progress(
        recipe.steps_in_all, open_console(as_json=False), phase_lines(recipe)
    ) as progress:
        return run(recipe, progress)


def fork(
    run: str,
    name: str,
    overrides: Sequence[str] = (),
    *,
    address: str | None = None,
    show: Callable[[Event], None] | None = None,
) -> TrainResult:
    """Begins a new run in the state that another one had, and trains it to its end. The parent
    stays as it is.

    Args:
        run: `RUN@STEP`, the parent by its folder, URL or name, and the step of one of its
            checkpoints; or `RUN`: its newest one.
        name: of the new run, which lies beside its parent unless `storage` is changed.
        overrides: `dotted.path=value`, the value in YAML: how its recipe differs from the parent's.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: as for `train`; default: also shows, before it begins, all that changes.

    Raises:
        UserError: there is no such checkpoint, or no fork of it can be so; one line for each
            reason, and nothing was begun.
        TrainingError: training did not come to its end; says why.
    """
    from elastrata.driver.fork import plan_fork, show_changes
    from elastrata.run.fork import begin_fork
    from elastrata.terminal.console import open_console
    from elastrata.trainer.preflight import check_storage

    plan = plan_fork(run, name, overrides)
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
    """Turns text into a data set and returns its manifest. Ray is started when all is checked.

    Args:
        config: which text, which tokenizer, how it becomes samples.
        out: folder or URL of the data set.
        overwrite: whether to replace a data set that is there.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        progress: called with stage, amount done, amount in all and their unit; default: shows them.

    Raises:
        UserError: text or configuration cannot work; one line for each reason.
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
    with StageProgress(open_console(as_json=False)) as shown:
        return run(shown)


def status(run: str) -> Status:
    """How a run stands, wherever it trains.

    Args:
        run: its folder or URL.

    Raises:
        UserError: there is no such run.
    """
    from elastrata.run.status import status

    return status(Storage(run))


def inspect(data: str, *, workers: int = 8, batch_size: int | None = None) -> Inspection:
    """A data set as training would see it: lengths, padding, balance.

    Args:
        data: its folder or URL.
        workers: that a batch would be dealt to.
        batch_size: samples of a step; default: 16 for every worker.

    Raises:
        UserError: there is none, or it is damaged.
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
    """Continues a text with a trained GPT.

    Args:
        model: folder or URL of a run, or an exported folder.
        prompt: the text.
        tokens: most that are added.
        temperature: below 1 likelier tokens become likelier; 0: always the likeliest.
        top_k: chooses among so many of the likeliest; None: among all.
        seed: the same one gives the same text.
        checkpoint: of a run: `newest`, `best` (smallest evaluation loss), or a step.

    Raises:
        UserError: there is no such model, or it predicts no next tokens.
    """
    from elastrata.inference.language_model import Sampling, continuation, load_language_model

    sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
    loaded = load_language_model(model, checkpoint=checkpoint)
    return continuation(loaded, prompt, tokens=tokens, sampling=sampling)


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
    from elastrata.sweeps.launch import sweep as sweep_on_ray
    from elastrata.terminal.console import open_console
    from elastrata.terminal.sweep_progress import SweepProgress

    if config.name is None:
        raise UserError("name: missing: expected the sweep's name; the same name continues it")
    if show is not None:
        return sweep_on_ray(config, name=config.name, address=address, show=show, warn=warn)
    with SweepProgress(config.space, open_console(as_json=False)) as progress:
        return sweep_on_ray(
            config, name=config.name, address=address, show=progress, warn=progress.warn
        )
