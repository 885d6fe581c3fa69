"""A checkpoint of another run as the parent of one: verified, and held against recipe and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from elastrata.checkpoints.commit import MARKER, Commit, problems
from elastrata.checkpoints.training_state import model_sizes
from elastrata.core.first_weights import sizes
from elastrata.recipe.begin_with import BeginConfig
from elastrata.recipe.recipe import Recipe
from elastrata.run.evidence import chosen_commit
from elastrata.run.folder import RUN_FILE, DataSet, Parent, read_identity, read_recipe
from elastrata.trainer.parent_fit import GivenWeights, data_tokenizer, fit_problems
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage

_KEY = "begin_with.weights"


def run_parent(
    begin: BeginConfig,
    recipe: Recipe,
    data: TrainingData,
    warn: Callable[[str], None],
    folder: str | None = None,
) -> Parent:
    """The checkpoint that `begin_with` means.

    Args:
        begin: names the run.
        recipe: that begins with it.
        data: what that trains on.
        warn: called with a line for each thing that people should know.
        folder: the checkpoint's name, where it was chosen before.

    Raises:
        UserError: a line for each reason why the recipe cannot begin with it.
    """
    run = Storage(begin.place)
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{begin.weights}: no run here ({RUN_FILE} is missing)")
    checkpoints = run.sub("checkpoints")
    commit = chosen_commit(run, folder or begin.revision or "newest", _KEY)
    if damaged := problems(checkpoints, commit):
        raise UserError(f"{_KEY}: checkpoint {checkpoints.uri(commit.folder)}: {damaged[0]}")
    before = read_recipe(run, identity)
    given = _given(run, before, commit, identity.data[0], data, warn)
    lines = fit_problems(given, begin, recipe, data)
    if begin.optimizer:
        lines += _optimizer_problems(before, recipe, given, data)
    if lines:
        raise UserError(*lines)
    return Parent(
        kind="run",
        url=run.uri(),
        sha256=checkpoints.sha256(commit.folder, MARKER),
        num_ids=given.num_ids,
        commit=commit.folder,
        step=commit.step,
        samples=commit.samples,
        optimizer=begin.optimizer,
    )


def _given(
    run: Storage,
    before: Recipe,
    commit: Commit,
    data_set: DataSet,
    data: TrainingData,
    warn: Callable[[str], None],
) -> GivenWeights:
    """What a checkpoint holds, and what its run's data set tells of its ids."""
    manifest, name = _manifest(data_set, data), f"{run.uri()}, step {commit.step}"
    if manifest is None:
        warn(f"{data_set.url}: not the data set of {name} any more: its ids are not checked")
    return GivenWeights(
        name=name,
        workload=before.workload.name,
        architecture=before.workload.architecture(),
        sizes=model_sizes(run.sub("checkpoints"), commit),
        num_ids=(manifest or data.train.manifest).vocabulary.size,
        tokenizer=data_tokenizer(Storage(data_set.url), manifest) if manifest else None,
    )


def _manifest(data_set: DataSet, data: TrainingData) -> Manifest | None:
    """That of the data set which a run was trained on; None where it is not there any more."""
    if data_set.fingerprint == data.train.manifest.fingerprint:
        return data.train.manifest
    try:
        found = Manifest.find(Storage(data_set.url))
    except UserError:
        return None
    return found if found and found.fingerprint == data_set.fingerprint else None


def _optimizer_problems(
    before: Recipe, recipe: Recipe, given: GivenWeights, data: TrainingData
) -> Iterator[str]:
    """Why a state of that run's optimizer cannot be gone on with."""
    theirs, ours = before.parts[-1].optimizer.name, recipe.parts[0].optimizer.name
    if ours != theirs:
        yield (
            f"begin_with.optimizer: true: the run was trained with {theirs}, this recipe has "
            f"{ours}: expected false, or optimizer.name {theirs}"
        )
    model = recipe.workload, data.vocabulary, data.seq_len
    if given.num_ids != data.vocabulary.size or given.sizes != sizes(*model):
        yield (
            "begin_with.optimizer: true: the tables of ids have other sizes in "
            f"{given.name}: expected false"
        )
