"""The preflight: all checks that are possible before anything is started or written."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from elastrata.device.capabilities import CudaFault, GpuSupport
from elastrata.recipe.data_sets import resolve_steps
from elastrata.recipe.recipe import PhaseKeys, Recipe
from elastrata.run.folder import DataSet, ForkOrigin, Mixtures, record_of
from elastrata.sparsity.config import GivenConfig
from elastrata.sparsity.layers import layer_shapes
from elastrata.sparsity.mask_file import read_masks
from elastrata.step.evaluate import OWN
from elastrata.tracking.tracker import DataInput
from elastrata.trainer.data import find_phase_data, limit_problems
from elastrata.trainer.evaluation import find_evaluation_sets, set_problems
from elastrata_pipelines.batches import Batches
from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import (
    Manifest,
    Vocabulary,
)
from elastrata_pipelines.phase import Origin, Phase, place_phases
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data sets of a run, ready to be read."""

    phases: tuple[Phase, ...]
    held_out: tuple[Batches | None, ...]
    """Held-out data of each phase."""
    sets: tuple[Mapping[str, Batches], ...]
    """Further evaluation sets of each phase, by name."""

    @property
    def evaluated(self) -> tuple[Mapping[str, Batches], ...]:
        """All evaluation data of each phase, by name of the set; that of `held_out` is `OWN`."""
        both = zip(self.held_out, self.sets, strict=True)
        return tuple({OWN: own, **sets} if own else {} for own, sets in both)

    @property
    def train(self) -> Batches:
        """The data set of the first phase."""
        return self.phases[0].batches

    @property
    def length_histogram(self) -> list[int]:
        """Number of samples of each length, over all different training data sets."""
        manifests = dict(self.trained_on)
        columns = zip_longest(*(m.length_histogram for m in manifests.values()), fillvalue=0)
        return [sum(column) for column in columns]

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, which all data sets share."""
        return self.train.manifest.vocabulary

    @property
    def seq_len(self) -> int:
        """Largest sample length in tokens over the phases."""
        return max(phase.batches.manifest.seq_len for phase in self.phases)

    @property
    def trained_on(self) -> tuple[tuple[str, Manifest], ...]:
        """Place and manifest of every data set of the phases in order, sources included."""
        return tuple(found for phase in self.phases for found in phase.batches.data_sets)

    @property
    def data_sets(self) -> tuple[DataSet, ...]:
        """The data sets of the phases in order, sources included."""
        return tuple(
            DataSet(url=url, fingerprint=manifest.fingerprint) for url, manifest in self.trained_on
        )

    @property
    def mixtures(self) -> Mixtures | None:
        """The mixture of each phase; None if no phase has one."""
        return record_of([phase.batches.mixture for phase in self.phases])

    @property
    def inputs(self) -> tuple[DataInput, ...]:
        """The data sets that are read, for experiment trackers."""
        batches = (one for sets in self.evaluated for one in sets.values())
        held_out = (found for one in batches for found in one.data_sets)
        return (
            *(_input(*found, "training") for found in self.trained_on),
            *(_input(*found, "evaluation") for found in held_out),
        )


def _input(url: str, manifest: Manifest, purpose: Literal["training", "evaluation"]) -> DataInput:
    return DataInput(
        url=url,
        purpose=purpose,
        fingerprint=manifest.fingerprint,
        samples=manifest.samples,
        tokens=manifest.tokens,
    )


def find_training_data(recipe: Recipe, origin: ForkOrigin | None = None) -> TrainingData:
    """Find the data sets of a recipe and check that it can train on them.

    Raises:
        UserError: one line for each problem.
    """
    # Durations in epochs or tokens become steps, by the data sets that exist.
    recipe = resolve_steps(recipe)
    sets, problems = find_evaluation_sets(recipe.evaluation)
    found = []
    for number, part in enumerate(recipe.parts):
        prefix = f"phases.{number}." if recipe.phases else ""
        try:
            found.append(find_phase_data(recipe, part, sets))
        except UserError as error:
            problems += [f"{prefix}{line}" for line in error.problems]
    manifests = [data.training.manifest for data in found]
    problems += _tokenizer_problems(recipe, manifests)
    problems += set_problems(sets, manifests, [data.held_out for data in found])
    if problems:
        # Phases that share a data set report the same problem; each line is printed once.
        raise UserError(*dict.fromkeys(problems))
    phases = [_phase(part, data.training) for part, data in zip(recipe.parts, found, strict=True)]
    start = _origin(phases, origin)
    if lines := limit_problems(recipe, phases, start):
        raise UserError(*lines)
    return TrainingData(
        phases=place_phases(phases, start),
        held_out=tuple(data.held_out for data in found),
        sets=tuple(data.sets for data in found),
    )


def _phase(part: PhaseKeys, train: Batches) -> Phase:
    limits = part.data.limits([manifest.samples for _, manifest in train.data_sets])
    return Phase(
        batches=train,
        steps=part.num_steps,
        batch_size=part.batch_size,
        warmup=part.batch_size_warmup,
        limits=limits,
        redistributes=part.data.when_exhausted == "redistribute" and any(limits),
    )


def _origin(phases: Sequence[Phase], origin: ForkOrigin | None) -> Origin[str] | None:
    """Return the position in the data that the phases start from; None unless the run is a fork."""
    if origin is None:
        return None
    return origin.placed(
        {url: manifest.fingerprint for phase in phases for url, manifest in phase.batches.data_sets}
    )


def _tokenizer_problems(recipe: Recipe, manifests: Sequence[Manifest]) -> Iterator[str]:
    first = next(iter(recipe.parts[0].data.places.values()))
    for number, (part, manifest) in enumerate(zip(recipe.parts, manifests, strict=False)):
        if manifest.tokenizer_fingerprint != manifests[0].tokenizer_fingerprint:
            key, place = next(iter(part.data.places.items()))
            yield (
                f"phases.{number}.data.{key}: {place}: prepared with another tokenizer than "
                f"{first}; `elastrata prepare` of the recipe makes both with the same one"
            )


def mask_problems(recipe: Recipe) -> list[str]:
    """Return one line for each phase whose file of masks is missing or belongs to another model."""
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
    """Check that runs can be stored there, by writing and deleting a small file.

    Raises:
        UserError: the storage cannot be reached, read or written.
    """
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    try:
        with storage.removing_empty_folders():
            storage.write(b"probe", probe)
            storage.delete(probe)
    except UserError as error:  # of a URL that names no storage
        raise UserError(*(f"storage: {line}" for line in error.problems)) from None
    # Each kind of storage raises errors of its own library.
    except Exception as error:
        raise UserError(
            f"storage: {storage.url}: cannot be written ({describe_error(error)})"
        ) from None


def cluster_problems(
    recipe: Recipe, gpus_per_worker: float, resources: Mapping[str, float]
) -> list[str]:
    """Return one line for each resource of which `workers.min` needs more than the cluster has."""
    workers = recipe.workers
    wanted = {"CPU": workers.min * workers.cpus, "GPU": workers.min * gpus_per_worker}
    return [
        f"workers.min: {workers.min}: needs {amount:g} {kind}s, the cluster has "
        f"{resources.get(kind, 0):g}"
        for kind, amount in wanted.items()
        if amount > resources.get(kind, 0)
    ]


def cuda_problems(gpus_per_worker: float, support: Mapping[str, GpuSupport]) -> list[str]:
    """Return one line for each reason why PyTorch cannot use GPUs that Ray offers.

    Args:
        gpus_per_worker: GPUs that each worker claims.
        support: what PyTorch can do with the GPUs of each node, by its address.
    """
    nodes: dict[CudaFault, list[str]] = {}
    for address, found in support.items():
        if found.fault:
            nodes.setdefault(found.fault, []).append(address)
    return [
        f"workers.gpus: {gpus_per_worker:g}: node {addresses[0]}"
        + (f" and {len(addresses) - 1} more" if len(addresses) > 1 else "")
        + f": {fault.found}; {fault.advice}, or train on CPUs with workers.gpus=0"
        for fault, addresses in nodes.items()
    ]
