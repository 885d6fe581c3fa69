"""The recipe: everything about *what* is trained. Where it runs is said elsewhere."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from elastrata.checkpoints.checkpoint import CheckpointConfig
from elastrata.recipe.config import Config
from elastrata.tracking.tracker import TrackingConfig
from elastrata.training.clip import ClipConfig
from elastrata.training.evaluate import EvaluationConfig
from elastrata.training.optimizer import OptimizerConfig
from elastrata.training.parallel import ParallelConfig
from elastrata.training.schedule import ScheduleConfig
from elastrata.training.target import TargetConfig
from elastrata.training.workload import Workload, workload_class
from elastrata_pipelines.batch_size_warmup import BatchSizeWarmup
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig


def _read_workload(value: Any) -> Any:
    if isinstance(value, dict):
        name = value.get("name")
        if not isinstance(name, str):
            raise ValueError("needs a name, such as 'bert'")
        try:
            found = workload_class(name)
        except UserError as error:
            raise ValueError(str(error)) from error
        return found.model_validate(value)
    return value


class DataConfig(Config):
    """The data set to train on."""

    path: str
    """Folder or URL of a prepared data set; `elastrata prepare` writes it."""
    prepare: PrepareConfig | None = None
    """How `elastrata prepare` makes it. Training does not need this part."""
    window_stripes: PositiveInt = 8
    """Stripes shuffled together: more makes batches more random and reading costlier."""


class WorkersConfig(Config):
    """How many workers, and what each one takes of a machine."""

    min: PositiveInt = 1
    max: PositiveInt = 1
    """The run starts at up to this many and goes on with fewer, down to `min`."""
    cpus: Annotated[float, Field(gt=0)] = 0.5
    """Logical CPUs each worker claims from Ray. Leave some for reading the data."""
    gpus: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    """GPUs each worker claims; `auto`: 1 where the cluster has any, else 0."""
    max_failures: Annotated[int, Field(ge=-1)] = 8
    """Losses of workers that the run survives before it gives up; -1: any number."""
    resize_seconds: Annotated[float, Field(ge=0)] = 60.0
    """How often the run looks whether it could go on with more workers."""
    spares: bool = True
    """Keeps an idle process with the imports done beside every worker, for the next group: seconds
    less until it trains, for some 0.5 GB of memory each, and 1 GB on the driver's node."""
    hang_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Workers that finish no step, evaluation or checkpoint for so long are killed and replaced."""
    threads: PositiveInt | None = None
    """CPU threads per worker for PyTorch; default: the machine's cores over its workers."""

    @model_validator(mode="after")
    def _ordered(self) -> WorkersConfig:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is larger than max ({self.max})")
        return self


class Recipe(Config):
    """One training run, from text to model."""

    name: str | None = None
    """The run's name and its folder's; the same name continues the same run. Default: the recipe
    file's name, or `bert-tiny` for the recipe `bert/tiny`."""
    workload: Annotated[SerializeAsAny[Workload], BeforeValidator(_read_workload)]
    data: DataConfig
    seed: int = 0
    steps: PositiveInt
    """Optimizer steps in all; fewer where a target is reached before."""
    target: TargetConfig | None = None
    """Ends the run before its last step. Default: there is none."""
    batch_size: PositiveInt
    """Samples per step, over all workers."""
    batch_size_warmup: BatchSizeWarmup | None = None
    """Smaller batches at first. The learning rate's schedule knows nothing of it."""
    micro_batch_tokens: PositiveInt = 8192
    """Most tokens that one worker runs through the model at once."""
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    clip: ClipConfig = ClipConfig()
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when loss or gradient are NaN or infinite: stop the run, or leave the batch out,
    note it in the history, and go on."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: parameters are gathered and applied in bfloat16, kept and updated in fp32."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: every block recomputes its activations in the backward pass."""
    compile: bool = False
    """Compiles every block with torch.compile."""
    parallel: ParallelConfig = ParallelConfig()
    workers: WorkersConfig = WorkersConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()
    storage: str = "runs"
    """Folder or URL under which every run has a folder of its own name."""

    @field_validator("name")
    @classmethod
    def _is_folder_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError("expected letters, digits, '.', '_' and '-': it names a folder")
        return name
