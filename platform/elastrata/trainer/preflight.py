"""The preflight: everything that can be found wrong before anything is started or written."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from elastrata.core.evaluate import EVALUATION_SEED
from elastrata.core.sparsity.config import GivenConfig
from elastrata.core.sparsity.layers import layer_shapes
from elastrata.core.sparsity.mask_file import read_masks
from elastrata.core.workload import model_spec
from elastrata.planner.choice import budgets
from elastrata.recipe.length import in_steps
from elastrata.recipe.phase import PhaseKeys
from elastrata.recipe.recipe import Recipe
from elastrata.run.folder import DataSet
from elastrata.run.fork_origin import ForkOrigin
from elastrata.tracking.entities import DataInput
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import (
    HELD_OUT,
    Manifest,
    Vocabulary,
    file_problems,
    read_held_out,
)
from elastrata_pipelines.format.manifest import AGAIN
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import Phase, one_after_another
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data sets of a run, ready to be read."""

    phases: tuple[Phase, ...]
    held_out: tuple[Batches | None, ...]
    """For the evaluations in every phase."""

    @property
    def train(self) -> Batches:
        """The data set of the first phase."""
        return self.phases[0].batches

    def after(self, origin: ForkOrigin | None) -> TrainingData:
        """The same data, read on where a fork goes on."""
        if origin is None:
            return self
        manifests = {phase.batches.url: phase.batches.manifest for phase in self.phases}
        known = origin.placed({url: one.fingerprint for url, one in manifests.items()})
        return replace(self, phases=one_after_another(self.phases, known))

    @property
    def length_histogram(self) -> list[int]:
        """How many samples have which length, over all different data sets."""
        manifests = {phase.batches.url: phase.batches.manifest for phase in self.phases}
        columns = zip_longest(*(m.length_histogram for m in manifests.values()), fillvalue=0)
        return [sum(column) for column in columns]

    @property
    def vocabulary(self) -> Vocabulary:
        """That of all its data sets."""
        return self.train.manifest.vocabulary

    @property
    def seq_len(self) -> int:
        """Tokens of the longest sample that any of them may have."""
        return max(phase.batches.manifest.seq_len for phase in self.phases)

    @property
    def data_sets(self) -> tuple[DataSet, ...]:
        """The data sets of the phases, in order."""
        return tuple(
            DataSet(url=phase.batches.url, fingerprint=phase.batches.manifest.fingerprint)
            for phase in self.phases
        )

    @property
    def inputs(self) -> tuple[DataInput, ...]:
        """The data sets that are read, for the record."""
        held_out = (batches for batches in self.held_out if batches)
        return (
            *(_input(phase.batches, "training") for phase in self.phases),
            *(_input(batches, "evaluation") for batches in held_out),
        )


def _input(batches: Batches, purpose: Literal["training", "evaluation"]) -> DataInput:
    return DataInput(
        url=batches.url,
        purpose=purpose,
        fingerprint=batches.manifest.fingerprint,
        samples=batches.manifest.samples,
        tokens=batches.manifest.tokens,
    )


def training_data(recipe: Recipe) -> TrainingData:
    """Finds the data sets of a recipe and checks that it can train on them.

    Raises:
        UserError: one line for each thing that is wrong.
    """
    problems: list[str] = []
    found = []
    recipe = in_steps(recipe)
    for number, part in enumerate(recipe.parts):
        prefix = f"phases.{number}." if recipe.phases else ""
        try:
            found.append(_data_of(recipe, part))
        except UserError as error:
            problems += [f"{prefix}{line}" for line in error.problems]
    problems += _tokenizer_problems(recipe, [train.manifest for train, _ in found])
    if problems:
        raise UserError(*dict.fromkeys(problems))
    phases = (
        Phase(
            batches=train,
            steps=part.num_steps,
            batch_size=part.batch_size,
            warmup=part.batch_size_warmup,
        )
        for part, (train, _) in zip(recipe.parts, found, strict=True)
    )
    return TrainingData(
        phases=one_after_another(phases), held_out=tuple(held_out for _, held_out in found)
    )


def _data_of(recipe: Recipe, part: PhaseKeys) -> tuple[Batches, Batches | None]:
    """The data set of a phase, and the one held out of it."""
    storage = Storage(part.data.path)
    manifest = Manifest.read(storage)
    problems = [
        *_missing_files(storage, manifest),
        *recipe.workload.problems(manifest),
        *_size_problems(part, manifest),
    ]
    try:
        held_out = _held_out(recipe, storage, manifest)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if recipe.target and not held_out:
        problems.append(
            f"target.metric: {recipe.target.metric}: needs held-out data, and there is none in "
            f"{storage.uri(HELD_OUT)}; prepare with data.prepare.held_out, or give evaluation.path"
        )
    if held_out:
        problems += _held_out_problems(part, manifest, *held_out)
    if recipe.is_automatic:
        problems += _plan_problems(recipe, manifest)
    if problems:
        raise UserError(*problems)
    manifest.read_lengths(storage)
    cuts = _budgets(part, [manifest, held_out[1]] if held_out else [manifest])
    window = part.data.window_stripes
    return (
        _batches(recipe, cuts, storage, manifest, seed=recipe.seed, window_stripes=window),
        _held_out_batches(recipe, cuts, *held_out) if held_out else None,
    )


def _plan_problems(recipe: Recipe, manifest: Manifest) -> tuple[str, ...]:
    """Why nobody can plan what the recipe leaves open."""
    try:
        model_spec(recipe.workload, manifest.vocabulary, manifest.seq_len)
    except UserError as error:
        return error.problems
    return ()


def _budgets(part: PhaseKeys, manifests: Sequence[Manifest]) -> tuple[int, ...]:
    """The numbers of tokens that micro-batches may have, ascending."""
    if part.micro_batch_tokens != "auto":
        return (part.micro_batch_tokens,)
    return budgets(max(map(longest_sample, manifests)), part.batch_size)


def _tokenizer_problems(recipe: Recipe, manifests: Sequence[Manifest]) -> Iterator[str]:
    for number, (part, manifest) in enumerate(zip(recipe.parts, manifests, strict=False)):
        if manifest.tokenizer_fingerprint != manifests[0].tokenizer_fingerprint:
            yield (
                f"phases.{number}.data.path: {part.data.path}: prepared with another tokenizer "
                f"than {recipe.parts[0].data.path}; `elastrata prepare` of the recipe makes both "
                "with one"
            )


def mask_problems(recipe: Recipe) -> list[str]:
    """One line for each phase whose file of masks is missing or that of another model."""
    problems = []
    for number, part in enumerate(recipe.parts):
        if isinstance(part.sparsity, GivenConfig):
            prefix = f"phases.{number}." if recipe.phases else ""
            try:
                read_masks(part.sparsity.masks, layer_shapes(recipe.workload))
            except UserError as error:
                problems += [f"{prefix}{line}" for line in error.problems]
    return problems


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
    recipe: Recipe, gpus_per_worker: float, resources: Mapping[str, float]
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
    return [f"{problem}; {AGAIN}" for problem in file_problems(storage, manifest)]


def _size_problems(part: PhaseKeys, manifest: Manifest) -> list[str]:
    problems = []
    if part.batch_size > manifest.samples:
        problems.append(
            f"batch_size: {part.batch_size}: larger than the data set "
            f"({manifest.samples} samples in {part.data.path})"
        )
    longest, most = longest_sample(manifest), part.micro_batch_tokens
    if most != "auto" and longest > most:
        problems.append(
            f"micro_batch_tokens: {most}: the data set has samples of "
            f"{longest} tokens; expected at least that"
        )
    return problems


def longest_sample(manifest: Manifest) -> int:
    """Tokens of the longest sample."""
    return max(length for length, count in enumerate(manifest.length_histogram) if count)


def _held_out(recipe: Recipe, data: Storage, manifest: Manifest) -> tuple[Storage, Manifest] | None:
    """The held-out data set: that of the recipe, or the one inside the training data."""
    if recipe.evaluation.path:
        storage = Storage(recipe.evaluation.path)
        return storage, Manifest.read(storage)
    held_out = read_held_out(data, manifest)
    return (data.sub(HELD_OUT), held_out) if held_out else None


def _held_out_batches(
    recipe: Recipe, cuts: tuple[int, ...], storage: Storage, manifest: Manifest
) -> Batches:
    """All stripes in one window and one seed for all runs: the draw is always the same."""
    return _batches(
        recipe, cuts, storage, manifest, seed=EVALUATION_SEED, window_stripes=manifest.stripes
    )


def _held_out_problems(
    part: PhaseKeys, manifest: Manifest, storage: Storage, held_out: Manifest
) -> list[str]:
    problems = _missing_files(storage, held_out)
    if held_out.tokenizer_fingerprint != manifest.tokenizer_fingerprint:
        problems.append(f"{storage.uri()}: prepared with another tokenizer than {part.data.path}")
    most = part.micro_batch_tokens
    if most != "auto" and longest_sample(held_out) > most:
        problems.append(
            f"micro_batch_tokens: {most}: the held-out data has samples of "
            f"{longest_sample(held_out)} tokens"
        )
    return problems


def _batches(
    recipe: Recipe,
    cuts: tuple[int, ...],
    storage: Storage,
    manifest: Manifest,
    *,
    seed: int,
    window_stripes: int,
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
        tokens_per_micro_batch=cuts[0],
        virtual_ranks=recipe.parallel.virtual_ranks,
        micro_batch_multiple=recipe.parallel.micro_batch_multiple,
        larger_budgets=cuts[1:],
    )
