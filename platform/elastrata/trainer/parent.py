"""The parent of a run that is about to begin: found, and held against its recipe and its data."""

from __future__ import annotations

from collections.abc import Callable

from elastrata.checkpoints.commit import commits
from elastrata.checkpoints.weights_folder import weights_folder
from elastrata.recipe.begin_with import BeginConfig, is_run
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import Parent, read_identity
from elastrata.trainer.parent_folder import folder_parent
from elastrata.trainer.parent_run import run_parent
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

KEY = "begin_with.weights"
_OWN = ("begin_with.", "workload.", "data.")
"""What lines begin with that name a key of their own."""


def find_parent(
    run: Storage, recipe: Recipe, data: TrainingData, warn: Callable[[str], None]
) -> Parent | None:
    """The parent of a run, None where its weights are drawn. One that has a checkpoint goes on from
    there, and its parent is not looked at any more; until then it begins with the same weights as
    the first time, or not at all.

    Args:
        run: its folder.
        recipe: with the key `begin_with`.
        data: what it trains on.
        warn: called with a line for each thing that people should know.

    Raises:
        UserError: a line for each reason why it cannot begin so.
    """
    begin = recipe.begin_with
    if begin is None:
        return None
    identity = read_identity(run)
    before = identity.parent if identity else None
    if before and commits(run.sub("checkpoints")):
        return before
    found = _found(begin, recipe, data, warn, before.commit if before else None)
    if before and found.sha256 != before.sha256:
        raise UserError(
            f"{KEY}: {begin.weights}: not the weights any more that the run began with: SHA-256 "
            f"{found.sha256[:12]}..., expected {before.sha256[:12]}..."
        )
    if new := data.vocabulary.size - found.num_ids:
        warn(f"{KEY}: {begin.weights}: the rows of {new:,} new ids are drawn")
    return found


def _found(
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
    chosen: str | None,
) -> Parent:
    """What `begin_with` means; `chosen` is the checkpoint or revision that it meant before."""
    try:
        if is_run(begin.place):
            return run_parent(begin, recipe, data, warn, chosen)
        folder = weights_folder(begin.place, chosen or begin.revision)
        return folder_parent(folder, begin, recipe, data, warn)
    except UserError as error:
        lines = (line if line.startswith(_OWN) else f"{KEY}: {line}" for line in error.problems)
        raise UserError(*lines) from None
