"""Recipes: everything that determines *what* is trained. The cluster is configured elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
    """A prepared data set, and its share in the mixture."""

    name: Annotated[str, Field(pattern=NAME)]
    """Its name in records and pictures, and that of its folder."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Folder or URL of the data set. Default: the folder of its name in `data.path`."""
    weight: Weight = 1.0
    """Its share, relative to the others': 3 beside 1 is three quarters. 0: nothing of it."""
    final_weight: Weight | None = None
    """Its share at the end of the phase, relative to the others' then: shares change evenly with
    the samples. Default: `weight`."""
    max_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most passes over it in the whole run; what happens then, `data.when_exhausted` says. Default:
    any number."""


class DataConfig(Config):
    """The data to train on."""

    path: Annotated[str, Field(min_length=1)]
    """Folder or URL of a prepared data set; `elastrata prepare` writes it. With `sources`: of the
    folder that has theirs."""
    sources: Annotated[tuple[MixedSource, ...], Field(max_length=256)] = ()
    """Several prepared data sets, mixed as they are read; all have one tokenizer. Default: the one
    data set at `path`."""
    weight_by: Literal["tokens", "samples"] = "tokens"
    """What weights are shares of. tokens: a source of longer samples gives fewer of them."""
    when_exhausted: Literal["error", "redistribute"] = "error"
    """What happens where a source would be read more than `max_epochs` times. error: the run does
    not begin. redistribute: from there on the others have its share, as they share the rest."""
    prepare: PrepareConfig | None = None
    """How `elastrata prepare` makes it. Training does not need this part."""
    window_stripes: Annotated[int, Field(gt=0, le=2**20)] = 8
    """Stripes shuffled together, of each source: more makes batches more random and reading
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
    """The keys that may change while a run goes on, as planned from the start."""

    either: ClassVar = tuple((key,) for key in LENGTHS)

    data: DataConfig
    """The data that it trains on."""
    steps: Annotated[int, Field(gt=0, le=10**9)] | None = None
    """Optimizer steps; or give `epochs`, or `tokens`."""
    epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Length in passes over the data set, in place of `steps`, which are counted when the run
    begins. Not of a mixture, whose sources have their own."""
    tokens: Annotated[int, Field(gt=0, lt=2**62)] | None = None
    """Length in tokens, likewise: as many steps as have them by the mean length of a sample."""
    batch_size: Annotated[int, Field(gt=0, le=2**24)]
    """Samples per step, over all workers."""
    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller batches at first. The learning rate's schedule knows nothing of it."""
    micro_batch_tokens: Annotated[int, Field(gt=0, le=2**30)] | Literal["auto"] = 8192
    """Most tokens that one worker runs through the model at once. auto: what is fastest among what
    its memory has room for, by the plan (`elastrata plan`), corrected by what the first steps
    measure."""
    optimizer: OptimizerConfig
    """How weights are updated."""
    schedule: ScheduleConfig = ScheduleConfig()
    """How the learning rate moves."""
    sparsity: SparsityConfig = None
    """Weights that are held at zero. Default: none."""

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps.

        Raises:
            UserError: the number depends on a data set that is not prepared yet.
        """
        if self.steps is None:
            places = ", ".join(self.data.places.values())
            raise UserError(
                f"{self.length}: how many steps that is depends on {places}, which is not "
                "prepared yet; make it with `elastrata prepare`, or give steps"
            )
        return self.steps

    @property
    def length(self) -> str:
        """The key that sets the length, and its value."""
        given = ((key, getattr(self, key)) for key in LENGTHS)
        return next((f"{key}: {value}" for key, value in given if value is not None), "steps: None")


class Phase(PhaseKeys):
    """One of several phases of a run. What it does not say is as the recipe says it."""

    name: str | None = None
    """For people."""


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
    """How many workers, and what each one takes of a machine."""

    min: Workers = 1
    """Fewest workers that the run goes on with; it waits for them."""
    max: Workers | Literal["auto"] = 1
    """The run starts at up to this many and goes on with fewer, down to `min`. auto: one for every
    GPU that the cluster has when the run starts; without any, one for every two CPUs."""
    cpus: Annotated[float, Field(gt=0, le=10_000)] = 0.5
    """Logical CPUs each worker claims from Ray. Leave some for reading the data."""
    gpus: Annotated[int, Field(ge=0, le=1000)] | Literal["auto"] = "auto"
    """GPUs each worker claims; `auto`: 1 where the cluster has any, else 0. Whole ones: NCCL wants
    one for every worker."""
    max_failures: Annotated[int, Field(ge=-1, le=10**9)] = 8
    """Losses of workers that the run survives before it gives up; -1: any number."""
    resize_seconds: Annotated[float, Field(ge=0, le=1e9)] = 60.0
    """How often the run looks whether it could go on with more workers."""
    spares: bool = True
    """Keeps an idle process with the imports done beside every worker, for the next group: seconds
    less until it trains, for some 0.5 GB of memory each, and 1 GB on the driver's node. A node
    that has less than twice that free keeps none."""
    stay: bool = True
    """Whether workers keep their processes, with all that is imported and compiled, when others are
    lost, added or taken away; else all are started anew."""
    hang_seconds: Annotated[float, Field(gt=0, le=1e9)] = 600.0
    """Workers that finish no step, evaluation or checkpoint for so long are killed and replaced."""
    threads: Annotated[int, Field(gt=0, le=10_000)] | None = None
    """CPU threads per worker for PyTorch; default: the machine's cores over its workers."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most memory that `auto` counts on for a worker. Default: all that its GPU has; without one,
    an equal share of what its machine has to spare."""

    speeds: Literal["equal", "measured"] | dict[str, Speed] = "equal"
    """How fast workers are beside one another: the faster ones get more of every batch, which holds
    the same samples. equal: all alike. measured: as they prove to be, again and again. A mapping
    from nodes (host, address or id), node groups or devices (A100, CPU) to factors: 0.5 is half as
    fast as those that are not named."""

    exclude_slower_than: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Leaves a node out, from the next resize or fault on, where a worker on it is slower than this
    share of the others of its kind, as long as `min` workers have room elsewhere. Default: none."""

    micro_batch_tokens: dict[str, Tokens] = Field(default_factory=dict)
    """Most tokens of a micro-batch on nodes (host, address or id), node groups or devices (T4) that
    have less memory than others, which go by the recipe's `micro_batch_tokens`, or by what that
    finds for their kind of device where it is auto. All have equally many micro-batches."""

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
    """One training run, from text to model: one phase, or several."""

    name: str | None = None
    """The run's name and its folder's; the same name continues the same run. Default: the recipe
    file's name, or `bert-tiny` for the recipe `bert/tiny`."""
    workload: Annotated[SerializeAsAny[Workload], BeforeValidator(_validate_workload)]
    """The model and its objective; `name` chooses one of those installed. A file that has
    `begin_with` may leave it out: the model is that of the weights."""
    begin_with: BeginWith | None = None
    """The weights that the run begins with: another run's, or those of a folder that transformers
    or `elastrata export` has written. Default: they are drawn."""
    phases: Annotated[tuple[Phase, ...], Field(max_length=1000)] = ()
    """The parts of the run, one after the other, where it has several: each says how it differs
    from the rest of the recipe. The model, the optimizer's state, the record and the progress run
    through."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    """Decides the first weights, the order of samples, and all that is drawn for each of them."""
    target: TargetConfig | None = None
    """Ends the run before its last step. Default: there is none."""
    clip: ClipConfig = ClipConfig()
    """How gradients are kept in bounds."""
    average: AverageConfig | None = None
    """An average of the weights that is kept beside them. Default: none."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Stops the run where loss or gradient are NaN or infinite, or leaves the batch out, notes it
    in the history, and goes on."""
    precision: Precision = "fp32"
    """bf16: parameters are gathered and applied in bfloat16, kept and updated in fp32."""
    activation_checkpointing: Recomputation | Literal["auto"] = "none"
    """full: every block keeps its input only, and computes everything again in the backward pass:
    the least memory. selective: it also keeps the results of attention and of every second matrix
    product. auto: one of these, by the plan and by what the first steps measure, as with
    `micro_batch_tokens`. What is learned is the same."""
    compile: bool = False
    """Compiles every block with torch.compile."""
    parallel: ParallelConfig = ParallelConfig()
    """How the model is divided over workers."""
    workers: WorkersConfig = WorkersConfig()
    """How many there are, and what each takes."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the model is evaluated, and on what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When the state is saved, and how much of it is kept."""
    tracking: TrackingConfig = TrackingConfig()
    """Where the run is recorded."""
    storage: Annotated[str, Field(min_length=1)] = "runs"
    """Folder or URL under which every run has a folder of its own name."""

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
        return f"Recipe, what it does not leave at its default:\n{self}"

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

    @property
    def steps_in_all(self) -> int:
        """Number of optimizer steps of the whole run."""
        return sum(part.num_steps for part in self.parts)

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
