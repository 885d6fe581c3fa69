"""The held-out loss of a run's checkpoint, computed anew in this process."""

from __future__ import annotations

from collections.abc import Mapping

from elastrata.checkpoints.training_state import load_plain
from elastrata.core.device import current_device
from elastrata.core.evaluate import evaluated
from elastrata.core.mesh import data_rank, lone_group
from elastrata.core.parallelize import ParallelConfig
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.shares import without_limits
from elastrata.run.evidence import chosen_commit
from elastrata.run.folder import RUN_FILE, RunIdentity, read_identity, read_recipe
from elastrata.run.weights import read_weights
from elastrata.trainer.held_out import HeldOut
from elastrata.trainer.preflight import training_data
from elastrata.trainer.trainer import Trainer
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


def evaluate_run(
    run_dir: str, checkpoint: str = "newest", weights: str | None = None
) -> Mapping[str, float]:
    """Evaluates a checkpoint of a run on its held-out data, as training did, on this machine alone.

    Args:
        run_dir: the run's folder or URL.
        checkpoint: `newest`, `best` (smallest evaluation loss), or a step.
        weights: of the checkpoint: `trained`, `average` or `mean:K`, see `read_weights`; None:
            those that training evaluated.

    Returns:
        `eval/loss` and the workload's other metrics, by name.

    Raises:
        UserError: there is no such run or checkpoint, or nothing is held out of its data.
    """
    run = Storage(run_dir)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    checkpoints = run.sub("checkpoints")
    commit = chosen_commit(run, checkpoint)
    recipe = _alone(read_recipe(run, identity), identity)
    state = None if weights is None else read_weights(run, commit, weights)
    if state is not None:
        recipe = recipe.model_copy(update={"average": None})
    data = training_data(without_limits(recipe))
    with lone_group(device := current_device()):
        trainer = Trainer(recipe, data.phases, device, world_size=1, per_node=1)
        trainer.restore(checkpoints, commit)
        if state is not None:
            load_plain(trainer.model, state)
        rank = data_rank(0, 1, 1)
        held_out = HeldOut(data.phases, data.evaluated, recipe.evaluation, rank, commit.step)
        step = held_out.of(commit.step)
        if not step:
            raise UserError(f"{data.phases[-1].batches.url}: has no held-out data to evaluate on")
        losses, seconds = trainer.evaluate(step)
    return evaluated(commit.step, losses, seconds).to_metrics()


def _alone(recipe: Recipe, identity: RunIdentity) -> Recipe:
    """The recipe undivided, with the full paths of its data."""
    left = iter([data_set.url for data_set in identity.data])
    parts = tuple(
        part.model_copy(update={"data": part.data.moved([next(left) for _ in part.data.places])})
        for part in recipe.parts
    )
    undivided = {"parallel": ParallelConfig()}
    if recipe.phases:
        return recipe.model_copy(update={**undivided, "phases": parts})
    return recipe.model_copy(update={**undivided, "data": parts[0].data})
