"""The preflight: everything that can be found wrong before anything is started or written."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from elastrata.recipe.recipe import Recipe
from elastrata.training.evaluate import EVALUATION_SEED
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.order import Order
from elastrata_pipelines.storage import Storage

HELD_OUT = "held_out"
"""Where `prepare` puts the held-out data set, inside the data set it was held out of."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data sets of a run, ready to be read."""

    train: Batches
    held_out: Batches | None


def training_data(recipe: Recipe) -> TrainingData:
    """Finds the data sets of a recipe and checks that it can train on them.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    storage = Storage(recipe.data.path)
    manifest = Manifest.read(storage)
    problems = [
        *_missing_files(storage, manifest),
        *recipe.workload.problems(manifest),
        *_size_problems(recipe, manifest),
    ]
    held_out = _held_out(recipe, storage)
    if recipe.target and not held_out:
        problems.append(
            f"target.metric: {recipe.target.metric}: needs held-out data, and there is none in "
            f"{storage.uri(HELD_OUT)}; prepare with data.prepare.held_out, or give evaluation.path"
        )
    if held_out:
        problems += _held_out_problems(recipe, manifest, *held_out)
    if problems:
        raise UserError(*problems)
    manifest.read_lengths(storage)
    window = recipe.data.window_stripes
    return TrainingData(
        train=_batches(recipe, storage, manifest, seed=recipe.seed, window_stripes=window),
        held_out=_held_out_batches(recipe, *held_out) if held_out else None,
    )


def check_storage(storage: Storage) -> None:
    """Makes sure that runs can be kept there, by writing and deleting a small file.

    Raises:
        UserError: it cannot be reached, read or written.
    """
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    try:
        storage.write(b"probe", probe)
        storage.delete(probe)
    except Exception as error:
        raise UserError(
            f"storage: {storage.url}: cannot be written ({type(error).__name__}: {error})"
        ) from None


def cluster_problems(
    recipe: Recipe, gpus_per_worker: float, resources: dict[str, float]
) -> list[str]:
    """One line for each resource that `workers.min` needs more of than the cluster has."""
    workers = recipe.workers
    wanted = {"CPU": workers.min * workers.cpus, "GPU": workers.min * gpus_per_worker}
    return [
        f"workers.min: {workers.min}: needs {amount:g} {kind}s, the cluster has "
        f"{resources.get(kind, 0):g}"
        for kind, amount in wanted.items()
        if amount > resources.get(kind, 0)
    ]


def _missing_files(storage: Storage, manifest: Manifest) -> list[str]:
    problems = []
    for entry in manifest.files:
        try:
            size = storage.size(entry.path)
        except FileNotFoundError:
            problems.append(f"{storage.uri(entry.path)}: missing; prepare the data set again")
            continue
        if size != entry.bytes:
            problems.append(
                f"{storage.uri(entry.path)}: {size} bytes, but the manifest says {entry.bytes}; "
                "prepare the data set again"
            )
    return problems


def _size_problems(recipe: Recipe, manifest: Manifest) -> list[str]:
    problems = []
    if recipe.batch_size > manifest.samples:
        problems.append(
            f"batch_size: {recipe.batch_size}: larger than the data set "
            f"({manifest.samples} samples in {recipe.data.path})"
        )
    longest = longest_sample(manifest)
    if longest > recipe.micro_batch_tokens:
        problems.append(
            f"micro_batch_tokens: {recipe.micro_batch_tokens}: the data set has samples of "
            f"{longest} tokens; expected at least that"
        )
    return problems


def longest_sample(manifest: Manifest) -> int:
    """Tokens of the longest sample."""
    return max(length for length, count in enumerate(manifest.length_histogram) if count)


def _held_out(recipe: Recipe, data: Storage) -> tuple[Storage, Manifest] | None:
    """The held-out data set: that of the recipe, or the one inside the training data."""
    storage = Storage(recipe.evaluation.path) if recipe.evaluation.path else data.sub(HELD_OUT)
    if recipe.evaluation.path is None and not storage.exists("manifest.json"):
        return None
    return storage, Manifest.read(storage)


def _held_out_batches(recipe: Recipe, storage: Storage, manifest: Manifest) -> Batches:
    """All stripes in one window and one seed for all runs: the draw is always the same."""
    return _batches(
        recipe, storage, manifest, seed=EVALUATION_SEED, window_stripes=manifest.stripes
    )


def _held_out_problems(
    recipe: Recipe, manifest: Manifest, storage: Storage, held_out: Manifest
) -> list[str]:
    problems = _missing_files(storage, held_out)
    if held_out.tokenizer_fingerprint != manifest.tokenizer_fingerprint:
        problems.append(f"{storage.uri()}: prepared with another tokenizer than {recipe.data.path}")
    if longest_sample(held_out) > recipe.micro_batch_tokens:
        problems.append(
            f"micro_batch_tokens: {recipe.micro_batch_tokens}: the held-out data has samples of "
            f"{longest_sample(held_out)} tokens"
        )
    return problems


def _batches(
    recipe: Recipe, storage: Storage, manifest: Manifest, *, seed: int, window_stripes: int
) -> Batches:
    return Batches(
        url=storage.uri(),
        manifest=manifest,
        order=Order(
            num_samples=manifest.samples,
            stripe_size=manifest.stripe_size,
            window_stripes=window_stripes,
            seed=seed,
        ),
        work=recipe.workload.work(manifest.vocabulary),
        tokens_per_micro_batch=recipe.micro_batch_tokens,
        virtual_ranks=recipe.parallel.virtual_ranks,
    )
