"""Evaluation of a trained model: its held-out loss, and tasks of an evaluation harness."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from elastrata.checkpoints.state import load_unsharded
from elastrata.device.capabilities import current_device
from elastrata.parallel.mesh import data_rank, lone_group
from elastrata.parallel.parallelize import ParallelConfig
from elastrata.recipe.data_sets import remove_epoch_limits
from elastrata.recipe.recipe import Recipe
from elastrata.run.consistency import choose_commit
from elastrata.run.folder import RUN_FILE, RunIdentity, read_identity, read_recipe
from elastrata.run.weights import read_weights
from elastrata.step.evaluate import evaluation_event
from elastrata.trainer.evaluation import HeldOutData
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.storage import Storage


def evaluate_run(
    run_dir: str, checkpoint: str = "newest", weights: str | None = None
) -> Mapping[str, float]:
    """Evaluate a checkpoint of a run on its held-out data as in training, in one process.

    Args:
        run_dir: the run's folder or URL.
        checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
        weights: weights of the checkpoint: `trained`, `average` or `mean:K`, see `read_weights`;
            None: those that training evaluated.

    Returns:
        `eval/loss` and the workload's other metrics, by name.

    Raises:
        UserError: the run or checkpoint does not exist, or its data has no held-out part.
    """
    run = Storage(run_dir)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    checkpoints = run.sub("checkpoints")
    commit = choose_commit(run, checkpoint)
    recipe = _alone(read_recipe(run, identity), identity)
    state = None if weights is None else read_weights(run, commit, weights)
    if state is not None:
        # The weights are given: without this, the trainer would put its average in their place.
        recipe = recipe.model_copy(update={"average": None})
    # Limits of sources concern training; here they could only cause errors.
    data = find_training_data(remove_epoch_limits(recipe))
    # The trainer's collectives need a process group, also with a single rank.
    with lone_group(device := current_device()):
        trainer = Trainer(recipe, data.phases, device, world_size=1, per_node=1)
        trainer.restore(checkpoints, commit)
        if state is not None:
            load_unsharded(trainer.model, state)
        rank = data_rank(0, 1, 1)
        held_out = HeldOutData(data.phases, data.evaluated, recipe.evaluation, rank, commit.step)
        step = held_out.of(commit.step)
        if not step:
            raise UserError(f"{data.phases[-1].batches.url}: has no held-out data to evaluate on")
        losses, seconds = trainer.evaluate(step)
    return evaluation_event(commit.step, losses, seconds).to_metrics()


def _alone(recipe: Recipe, identity: RunIdentity) -> Recipe:
    """Return the recipe for one process, with absolute paths of its data."""
    left = iter([data_set.url for data_set in identity.data])
    parts = tuple(
        part.model_copy(update={"data": part.data.move_to([next(left) for _ in part.data.places])})
        for part in recipe.parts
    )
    undivided = {"parallel": ParallelConfig()}
    if recipe.phases:
        return recipe.model_copy(update={**undivided, "phases": parts})
    return recipe.model_copy(update={**undivided, "data": parts[0].data})


_PACKAGE = "lm_eval"
_LEFT_OUT = ("alias", "name", "sample_len", "sample_count")
"""Entries of the harness' results that are not metrics."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Settings for the evaluation of tasks."""

    shots: int | None = None
    """Solved examples before each question; None: the task's default."""
    limit: int | None = None
    """Questions of each task; None: all."""
    batch_size: int = 8
    """Questions in a batch."""


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """Results of a model on tasks."""

    metrics: Mapping[str, float]
    """By `TASK/METRIC`: `hellaswag/acc_norm`, `hellaswag/acc_norm_stderr`..."""
    samples: Mapping[str, int]
    """Number of evaluated questions, by task."""
    harness: str
    """Version of the harness."""


def check_harness() -> None:
    """Check that the harness is installed.

    Raises:
        UserError: it is not.
    """
    if find_spec(_PACKAGE) is None:
        raise UserError(
            "evaluate: the Language Model Evaluation Harness is not installed: "
            "pip install 'elastrata[evaluate]', or pip install lm_eval accelerate"
        )


class Tasks:
    """Tasks of the harness, by name.

    Raises:
        UserError: the harness is not installed, or does not have these tasks.
    """

    def __init__(self, names: Sequence[str], include: Path | None = None) -> None:
        check_harness()
        if include is not None and not include.is_dir():
            raise UserError(f"--include: {include}: no such folder")
        with _quiet():
            from lm_eval.tasks import TaskManager

            # Tasks in this folder take precedence over the harness' own of the same name.
            self._manager: Any = TaskManager(include_path=str(include) if include else None)
        known = self._manager.all_tasks
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UserError(
                *(
                    f"--tasks: {name}: no such task{suggest_nearest(name, known)}"
                    for name in unknown
                )
            )
        self._names = list(dict.fromkeys(names))

    def evaluate(self, folder: Path, options: TaskOptions) -> TaskResults:
        """Evaluate a model in its stored number type, on the GPU if there is one.

        Raises:
            UserError: a task cannot be evaluated, e.g. because its data is not available.
        """
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with _quiet():
            from lm_eval import simple_evaluate

            try:
                found: Any = simple_evaluate(
                    model="hf",
                    model_args={"pretrained": str(folder), "dtype": "auto"},
                    tasks=self._names,
                    task_manager=self._manager,
                    num_fewshot=options.shots,
                    limit=options.limit,
                    batch_size=options.batch_size,
                    device=device,
                    log_samples=False,
                )
            # Errors of data sets and their loaders.
            except (OSError, ValueError, LookupError) as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                raise UserError(f"--tasks: {', '.join(self._names)}: {reason}") from error
        return TaskResults(
            metrics=dict(_numbers(found["results"])),
            # The number after `limit` was applied.
            samples={name: count["effective"] for name, count in found["n-samples"].items()},
            harness=version(_PACKAGE),
        )


def _numbers(results: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield every number of the harness' results with its name."""
    for task, values in results.items():
        for key, value in values.items():
            # The harness names them METRIC,FILTER; a filter named `none` stands for no filter.
            metric, _, way = key.partition(",")
            if metric in _LEFT_OUT or isinstance(value, bool | str) or value is None:
                continue
            yield f"{task}/{metric}" + (f".{way}" if way not in ("", "none") else ""), float(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the harness and its libraries while the block lasts."""
    names = (_PACKAGE, "datasets", "evaluate", "httpx", "httpx2")
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
