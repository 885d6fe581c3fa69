"""Recipes: everything that determines *what* is trained. The cluster is configured elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.config import NAME, Config
from elastrata.optim.optimizer import OptimizerConfig
from elastrata.parallel.activation_checkpointing import Recomputation
from elastrata.parallel.parallelize import ParallelConfig, Precision, Workers
from elastrata.recipe.begin_with import BeginWith
from elastrata.recipe.value_types import merge_sections
from elastrata.sparsity.config import SparsityConfig
from elastrata.step.average import AverageConfig
from elastrata.step.clip import ClipConfig
from elastrata.step.evaluate import EvaluationConfig
from elastrata.step.schedule import ScheduleConfig, learning_rate
from elastrata.step.target import TargetConfig
from elastrata.tracking.tracker import TrackingConfig
from elastrata.workload.workload import Workload, workload_class
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.groups import BatchSizeWarmup
from elastrata_pipelines.preparation import PrepareConfig

Weight = Annotated[float, Field(ge=0, le=1e9)]


class MixedSource(Config):
    """A prepared data set and its share in the mixture."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of the source in records and plots, and of its folder."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder or URL of the data set. Default: the folder of that name in `data.path`."""
    weight: Weight = 1.0
    """Relative share of the source: 3 and 1 are three quarters and one quarter. 0: unused."""
    final_weight: Weight | None = None
    """Relative share at the end of the phase, reached linearly. Default: `weight`."""
    max_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Maximum passes over the source in the whole run; see `data.when_exhausted`. Default: no
    limit."""


class DataConfig(Config):
    """Training data."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or URL of a data set written by `elastrata prepare`; with `sources`, of the folder
    that contains them."""
    sources: Annotated[tuple[MixedSource, ...], Field(max_length=256)] = ()
    """Prepared data sets to mix during training; all have one tokenizer. Default: the data set at
    `path`."""
    weight_by: Literal["tokens", "samples"] = "tokens"
    """Unit of the weights. tokens: sources with longer samples contribute fewer samples."""
    when_exhausted: Literal["error", "redistribute"] = "error"
    """Action if a source would exceed its `max_epochs`. error: refuse to start. redistribute: its
    share goes to the others, in proportion to theirs."""
    prepare: PrepareConfig | None = None
    """Configuration of `elastrata prepare`; not needed for training."""
    window_stripes: Annotated[int, Field(gt=0, le=2**20)] = 8
    """Stripes of each source that are shuffled together. More: batches are more random, reading is
    costlier."""

    @model_validator(mode="after")
    def _only_with_sources(self) -> Self:
        for key in ("weight_by", "when_exhausted"):
            value = getattr(self, key)
            if not self.sources and value != type(self).model_fields[key].default:
                raise ValueError(f"{key}: {value}: only with sources")
        return self

    @property
    def places(self) -> dict[str, str]:
        """Folder or URL of each data set, by the key that names it."""
        if not self.sources:
            return {"path": self.path}
        return {
            f"sources.{number}.path": source.path or self._below(source.name)
            for number, source in enumerate(self.sources)
        }

    @property
    def title(self) -> str:
        """Short description: the folder, or the sources with their shares."""
        total = sum(self.weights)
        if not total:
            return self.path
        shares = (f"{one.name} {one.weight / total:.0%}" for one in self.sources)
        return ", ".join(shares)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the sources at the start of the phase."""
        return tuple(source.weight for source in self.sources)

    @property
    def final_weights(self) -> tuple[float, ...] | None:
        """Weights of the sources at the end of the phase; None if they do not change."""
        if all(source.final_weight is None for source in self.sources):
            return None
        return tuple(
            source.weight if source.final_weight is None else source.final_weight
            for source in self.sources
        )

    def limits(self, samples: Sequence[int]) -> tuple[int | None, ...]:
        """Return the largest number of samples of each source that the run may read, or None if
        unlimited."""
        return tuple(
            None if source.max_epochs is None else int(source.max_epochs * count)
            # Without sources there is one data set and no limit.
            for source, count in zip(self.sources, samples, strict=bool(self.sources))
        )

    def move_to(self, places: Sequence[str]) -> DataConfig:
        """Return the same data with its data sets at other places."""
        if not self.sources:
            return self.model_copy(update={"path": places[0]})
        sources = tuple(
            source.model_copy(update={"path": place})
            for source, place in zip(self.sources, places, strict=True)
        )
        return self.model_copy(update={"sources": sources})

    def _below(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"


LENGTHS = ("steps", "epochs", "tokens")
"""Mutually exclusive keys for the length of a phase."""
PER_PHASE = (*LENGTHS, "batch_size_warmup")
"""Keys that are None in the recipe if no phase uses the recipe's value."""
NO_LENGTH = f"steps: missing: expected {', '.join(LENGTHS[:-1])} or {LENGTHS[-1]}"


class PhaseKeys(Config):
    """Keys that may differ between the phases of a run."""

    either: ClassVar = tuple((key,) for key in LENGTHS)

    data: DataConfig
    """Training data."""
    steps: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Length in optimizer steps. Either this, `epochs` or `tokens`."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Length in passes over the data set, converted to steps when the run starts. Not for mixtures,
    in which each source has its own."""
    tokens: Annotated[int, Field(gt=0, lt=2**62)] | None = None
    """Length in tokens, converted to steps by the mean length of a sample."""
    batch_size: Annotated[int, Field(gt=0, le=2**24)]
    """Samples per step, over all workers."""
    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller batches in the first steps. Does not affect the learning rate."""
    micro_batch_tokens: Annotated[int, Field(gt=0, le=2**30)] | Literal["auto"] = 8192
    """Maximum tokens per worker and forward pass. auto: the fastest that fits into memory, by the
    plan (`elastrata plan`) and measurements in the first steps."""
    optimizer: OptimizerConfig
    """Optimizer and its settings."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Learning-rate schedule."""
    sparsity: SparsityConfig = None
    """Sparse training, with weights held at zero. Default: dense."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps.

        Raises:
            UserError: the number depends on a data set that is not prepared yet.
        """
        if self.steps is None:
            places = ", ".join(self.data.places.values())
            raise UserError(
                f"{self.length}: the number of steps depends on {places}, which is not "
                "prepared yet; make it with `elastrata prepare`, or set steps"
            )
        return self.steps

    @property
    def length(self) -> str:
        """The key that sets the length, and its value."""
        given = ((key, getattr(self, key)) for key in LENGTHS)
        return next((f"{key}: {value}" for key, value in given if value is not None), "steps: None")


class Phase(PhaseKeys):
    """A phase of a run. Omitted keys have the recipe's values."""

    name: str | None = None
    """Label of the phase in the progress display."""


def inherit_phase_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with phases that contain all keys that they inherit.

    Args:
        recipe: values as written; not modified.
    """
    phases = recipe.get("phases")
    if not isinstance(phases, Sequence) or isinstance(phases, str):
        return dict(recipe)
    # Merging before validation lets a phase omit required keys.
    common = {key: recipe[key] for key in PhaseKeys.model_fields if key in recipe}
    whole = [
        merge_sections(Phase, common, phase) if isinstance(phase, Mapping) else phase
        for phase in phases
    ]
    return {**recipe, "phases": whole}


def _without_preparation(part: Part) -> Part:
    return part.model_copy(update={"data": part.data.model_copy(update={"prepare": None})})


def _is_in_phases(section: Any, phase_values: Sequence[Any]) -> bool:
    """Return whether every value of a section is used by some phase."""
    if not isinstance(section, Config):
        return False
    phases = [dict(part) for part in phase_values if isinstance(part, type(section))]
    return all(
        value in (below := [part[key] for part in phases]) or _is_in_phases(value, below)
        for key, value in section
    )


def _validate_workload(value: Any) -> Any:
    if isinstance(value, dict):
        name = value.get("name")
        if not isinstance(name, str):
            raise ValueError("needs a name, such as 'bert'")
        try:
            workload_type = workload_class(name)
        except UserError as error:
            raise ValueError(str(error)) from error
        return workload_type.model_validate(value)
    return value


Part = TypeVar("Part", bound=PhaseKeys)
Speed = Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)]
Tokens = Annotated[int, Field(gt=0, le=2**30)]


class WorkersConfig(Config):
    """Number and resources of the workers, and the handling of lost and slow ones."""

    min: Workers = 1
    """Minimum number of workers; the run waits for them."""
    max: Workers | Literal["auto"] = 1
    """Maximum number of workers. The run starts with up to this many and continues with fewer, down
    to `min`. auto: one per GPU of the cluster at the start or, without GPUs, one per two CPUs."""
    cpus: Annotated[float, Field(gt=0, le=10_000)] = 0.5
    """Logical CPUs that each worker reserves from Ray. Leave some for reading the data."""
    gpus: Annotated[int, Field(ge=0, le=1000)] | Literal["auto"] = "auto"
    """GPUs that each worker reserves; NCCL needs a whole one. auto: 1 if the cluster has GPUs, else
    0."""
    max_failures: Annotated[int, Field(ge=-1, le=10**9)] = 8
    """Maximum worker losses that the run survives; -1: no limit."""
    resize_seconds: Annotated[float, Field(ge=0, le=1e9)] = 60.0
    """Seconds between checks for room for more workers."""
    spares: bool = True
    """Whether to keep an idle process with finished imports per worker, so that the next group
    starts seconds faster. Each takes about 0.5 GB, plus 1 GB on the driver's node; nodes with less
    than twice that free keep none."""
    stay: bool = True
    """Whether workers keep their processes, imports and compiled code when others are lost, added
    or removed. false: restart all."""
    hang_seconds: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    """Seconds without a finished step, evaluation or checkpoint after which workers are killed and
    replaced."""
    threads: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """PyTorch's CPU threads per worker. Default: the machine's cores divided by its workers."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Maximum GB per worker that `auto` uses. Default: the free memory of its GPU or, without one,
    an equal share of its machine's."""

    speeds: Literal["equal", "measured"] | dict[str, Speed] = "equal"
    """Relative speeds of workers; faster ones get more of every batch, whose samples stay the same.
    measured: measured throughout the run. A mapping from nodes (host, address or id), node groups
    or devices (A100, CPU) gives factors: 0.5 is half the speed of unnamed ones."""

    exclude_slower_than: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Minimum speed of a worker relative to others with the same kind of device. Nodes with slower
    ones are left out from the next resize or failure on, if `min` workers have room elsewhere.
    Default: no limit."""

    micro_batch_tokens: dict[str, Tokens] = Field(default_factory=dict)
    """Maximum tokens per micro-batch on nodes (host, address or id), node groups or devices (T4)
    with less memory. Others use the recipe's `micro_batch_tokens` or, if that is auto, the value
    for their kind of device. All workers have equal numbers of micro-batches."""

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if self.max != "auto" and self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self

    @property
    def most(self) -> int:
        """Largest number of workers; the guaranteed minimum if `max` is auto."""
        return self.min if self.max == "auto" else self.max

    def gpus_each(self, gpus: float) -> float:
        """Return the GPUs that each worker claims in a cluster with `gpus` GPUs."""
        if self.gpus == "auto":
            return 1.0 if gpus >= 1 else 0.0
        return float(self.gpus)


class Recipe(PhaseKeys):
    """A training run, from text to model, in one or several phases."""

    name: str | None = None
    """Name of the run and its folder; an existing run is resumed. Default: the recipe file's name,
    or `bert-tiny` for the recipe `bert/tiny`."""
    workload: Annotated[SerializeAsAny[Workload], BeforeValidator(_validate_workload)]
    """Model and objective; `name` selects an installed workload. Optional with `begin_with`, which
    determines the model."""
    begin_with: BeginWith | None = None
    """Initial weights from another run, the hub, or a folder written by transformers or `elastrata
    export`. Default: initialised at random."""
    phases: Annotated[tuple[Phase, ...], Field(max_length=1000)] = ()
    """Consecutive parts of the run, each with the keys in which it differs from the recipe. Model,
    optimizer state, history and progress carry over."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Seed of initial weights, sample order, and random choices per sample."""
    target: TargetConfig | None = None
    """Target metric that ends the run early. Default: none."""
    clip: ClipConfig = ClipConfig()
    """Gradient clipping."""
    average: AverageConfig | None = None
    """Average of the weights, kept in addition to them. Default: none."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action if the loss or gradient is NaN or infinite. stop: end the run. skip: leave the batch
    out and record it in the history."""
    precision: Precision | Literal["auto"] = "fp32"
    """Precision of the computation. bf16: gather and use parameters in bfloat16, but store and
    update them in fp32. auto: bf16 on GPUs that have it, else fp32; a run keeps what it began with.
    Matrix products in fp32 use TF32 on GPUs."""
    activation_checkpointing: Recomputation | Literal["auto"] = "none"
    """Recomputation in the backward pass; results are the same. full: blocks keep only their
    inputs, for the least memory. selective: they also keep the results of attention and every
    second matrix product. auto: chosen like `micro_batch_tokens`."""
    compile: bool | Literal["auto"] = False
    """Whether to compile blocks with torch.compile. auto: on GPUs, unless another key excludes
    it."""
    parallel: ParallelConfig = ParallelConfig()
    """Distribution of the model over the workers."""
    workers: WorkersConfig = WorkersConfig()
    """Number and resources of the workers."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Interval and data of evaluations."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Interval and retention of checkpoints."""
    tracking: TrackingConfig = TrackingConfig()
    """Tracking of the run in MLflow."""
    storage: Annotated[str, Field(min_length=1)] = "runs"
    """Folder or URL that contains a folder for each run."""

    @model_validator(mode="before")
    @classmethod
    def _phases_inherit(cls, values: Any) -> Any:
        return inherit_phase_keys(values) if isinstance(values, Mapping) else values

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("expected letters, digits, '.', '_' and '-': it names a folder")
        return name

    @model_validator(mode="after")
    def _replace_unused_values(self) -> Recipe:
        """Replace values that no phase uses with those of the first phase."""
        # Records would otherwise show values that no phase trains with.
        for key in PhaseKeys.model_fields if self.phases else ():
            own, theirs = getattr(self, key), [getattr(phase, key) for phase in self.phases]
            if own not in theirs and not _is_in_phases(own, theirs):
                # The model is frozen, but validators still construct it.
                self.__dict__[key] = None if key in PER_PHASE else theirs[0]
        return self

    def __str__(self) -> str:
        values = self.model_dump(mode="json", exclude_defaults=True)
        workload = {"name": self.workload.name, **values["workload"]}
        return yaml.safe_dump({**values, "workload": workload}, sort_keys=False).rstrip()

    def __repr__(self) -> str:
        return f"Recipe, values that differ from their defaults:\n{self}"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def parts(self) -> tuple[PhaseKeys, ...]:
        """Phases of the run, or the recipe itself if it has no phases."""
        return self.phases or (self,)

    @property
    def is_automatic(self) -> bool:
        """True if a key is `auto` and each group of workers has to find its value."""
        is_open = "auto" in (self.activation_checkpointing, self.parallel.gradient_sync)
        return is_open or any(part.micro_batch_tokens == "auto" for part in self.parts)

    def on_device(self, *, is_gpu: bool, has_bf16: bool, can_compile: bool = True) -> Recipe:
        """Return the recipe with values in place of `auto` for `precision` and `compile`.

        Args:
            is_gpu: whether workers train on GPUs.
            has_bf16: whether these compute in bfloat16.
            can_compile: whether a compiler is there.
        """
        values: dict[str, object] = {}
        if self.precision == "auto":
            values["precision"] = "bf16" if is_gpu and has_bf16 else "fp32"
        if self.compile == "auto":
            is_excluded = (
                self.parallel.schedule == "zero_bubble" or self.workers.speeds == "measured"
            )
            values["compile"] = is_gpu and can_compile and not is_excluded
        return self.model_copy(update=values) if values else self

    @property
    def used_precision(self) -> Precision:
        """The precision.

        Raises:
            ValueError: it is still `auto`; see `on_device`.
        """
        if self.precision == "auto":
            raise ValueError("precision: auto depends on the device")
        return self.precision

    @property
    def steps_in_all(self) -> int:
        """Number of optimizer steps of the whole run."""
        return sum(part.num_steps for part in self.parts)

    @cached_property
    def given(self) -> str | None:
        """The short text from which `load_recipe` read the recipe; None if it was made in Python.

        It is only kept beside a run, and takes part in no comparison.
        """
        return None

    def without_preparation(self) -> Recipe:
        """Return the recipe for records, without `data.prepare`."""
        # The manifest of a data set states how it was actually prepared.
        phases = tuple(_without_preparation(phase) for phase in self.phases)
        return _without_preparation(self).model_copy(update={"phases": phases})

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0. Each phase has a
        separate schedule.

        Raises:
            ValueError: the run has fewer steps.
        """
        before = 0
        for part in self.parts:
            if step < before + part.num_steps:
                return learning_rate(
                    part.schedule, peak=part.optimizer.lr, step=step - before, steps=part.num_steps
                )
            before += part.num_steps
        raise ValueError(f"step {step} of {before}")
