"""The training step of one device, measured: the engine's own loop, without Ray."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version

import torch

from elastrata.bench.samples import Samples
from elastrata.device.capabilities import (
    current_device,
    device_name,
    peak_flops,
    peak_memory_bytes,
)
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.step.records import StepRecord
from elastrata.trainer.build_model import (
    divided_model,
    looked_for,
    missing_here,
    phase_masks,
)
from elastrata.trainer.trainer import training_loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError

_PACKAGES = ("elastrata", "torch", "ray", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The middle of some measurements, and the bounds of their middle half."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least one value; between two where none lies at the place."""
    if len(values) == 1:
        return Quartiles(lower=values[0], median=values[0], upper=values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower=lower, median=median, upper=upper)


def versions() -> dict[str, str]:
    """Version by package, of those that are installed here, Python and CUDA included."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a GPU machine with PyTorch alone runs most measurements
            continue
    return {**versions, "cuda": torch.version.cuda} if torch.version.cuda else versions


MFU_CONVENTION = (
    "6 FLOPs per matmul parameter and token it is applied to, plus attention, halved where it is "
    "causal; real tokens only, recomputation not counted; of the dense bf16 peak"
)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of a recipe's steps on one device. Quartiles are over the steps."""

    device: str
    parameters: int
    """Numbers that are trained."""
    batch_size: int
    micro_batches: float
    """In a step, on average."""
    sequences_per_second: Quartiles
    tokens_per_second: Quartiles
    """Real tokens."""
    positions_per_second: Quartiles
    """Tokens with padding."""
    padding: float
    """Share of the positions that is padding."""
    flops_per_token: float
    """Forward and backward, per real token."""
    mfu: Quartiles | None
    """None where the device's peak is not known."""
    mfu_convention: str
    peak_flops: float | None
    """The device's, dense bf16, per second."""
    peak_memory_bytes: int
    """Of all steps, those that warm up too, on the device where it is a GPU; else of the process,
    building the model included."""
    seconds: Quartiles
    """A step, until the device has done all of it."""
    seconds_by_phase: Mapping[str, Quartiles]
    """collating, forward_backward, clip_optimizer. What is left of a step is bookkeeping."""
    seconds_warming_up: float
    """The steps before those that count, compilation included."""
    loss: float
    """After the last step."""
    substitutions: tuple[str, ...]
    """A line for each thing that the recipe asks for and this machine lacks, with what was used."""


@dataclass(frozen=True)
class _TimedStep:
    record: StepRecord
    seconds: float
    """From the end of the step before, on the device."""

    @property
    def positions(self) -> float:
        return self.record.batch_tokens / (1 - self.record.padding)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase. When the host has finished the step, the device may still update."""
        record = self.record
        return {
            "collating": record.seconds_collating,
            "forward_backward": record.seconds_in_model,
            "clip_optimizer": record.seconds_in_optimizer + self.seconds - record.seconds,
        }


def measure_steps(recipe: Recipe, samples: Samples, *, warm_up: int) -> StepFigures:
    """Trains on `samples` and looks at the steps after the first `warm_up` ones.

    Raises:
        TrainingError: the loss is not finite, and the recipe does not skip such steps.
        UserError: several workers compute every sample together; this is one.
    """
    for key in ("tensor", "pipeline"):
        if (size := getattr(recipe.parallel, key)) > 1:
            raise UserError(f"parallel.{key}: {size}: expected 1: one process is measured here")
    torch.set_num_threads(recipe.workers.threads or len(os.sched_getaffinity(0)))
    device, workload = current_device(), recipe.workload
    endless = recipe.model_copy(
        update={"steps": max(recipe.steps or 0, len(samples.steps)), "phases": ()}
    )
    with lone_group(device):
        divided = divided_model(endless, samples.vocabulary, samples.seq_len, device, 1)
        model = divided.model
        optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
        masks = phase_masks(endless, divided)
        loop = training_loop(endless, divided.clip, samples.vocabulary, device, 1, masks=masks)
        run = loop.run(divided.forward_backward, optimizer, samples.steps, Start())
        timed = list(_timed((record for record, _ in run), device))
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    figures = _figures(timed, warm_up, device, parameters)
    return replace(figures, substitutions=tuple(missing_here(recipe, looked_for(recipe, device))))


def _timed(records: Iterable[StepRecord], device: torch.device) -> Iterator[_TimedStep]:
    began = time.perf_counter()
    for record in records:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        yield _TimedStep(record, ended - began)
        began = ended


def _figures(
    timed: Sequence[_TimedStep], warm_up: int, device: torch.device, parameters: int
) -> StepFigures:
    measured = timed[warm_up:]
    tokens = sum(step.record.batch_tokens for step in measured)

    def over_steps(value: Callable[[_TimedStep], float]) -> Quartiles:
        return quartiles([value(step) for step in measured])

    peak = peak_flops(device)
    return StepFigures(
        device=device_name(device),
        parameters=parameters,
        batch_size=measured[0].record.batch_samples,
        micro_batches=sum(step.record.micro_batches for step in measured) / len(measured),
        sequences_per_second=over_steps(lambda step: step.record.batch_samples / step.seconds),
        tokens_per_second=over_steps(lambda step: step.record.batch_tokens / step.seconds),
        positions_per_second=over_steps(lambda step: step.positions / step.seconds),
        padding=1 - tokens / sum(step.positions for step in measured),
        flops_per_token=sum(step.record.flops for step in measured) / tokens,
        mfu=over_steps(lambda step: step.record.flops / step.seconds / peak) if peak else None,
        mfu_convention=MFU_CONVENTION,
        peak_flops=peak,
        peak_memory_bytes=peak_memory_bytes(device),
        seconds=over_steps(lambda step: step.seconds),
        seconds_by_phase={
            name: quartiles([step.phases[name] for step in measured]) for name in measured[0].phases
        },
        seconds_warming_up=sum(step.seconds for step in timed[:warm_up]),
        loss=measured[-1].record.loss,
        substitutions=(),
    )
