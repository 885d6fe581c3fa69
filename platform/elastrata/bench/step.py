"""Measurement of the training step on one device: the engine's loop without Ray."""

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
    build_divided_model,
    build_masks,
    missing_features,
    probe_capabilities,
    settle,
)
from elastrata.trainer.trainer import build_loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.errors import UserError

_PACKAGES = ("elastrata", "torch", "ray", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Median and quartiles of measurements."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """Return the interpolated quartiles of at least one value."""
    if len(values) == 1:
        return Quartiles(lower=values[0], median=values[0], upper=values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower=lower, median=median, upper=upper)


def versions() -> dict[str, str]:
    """Return the version of each installed package, including Python and CUDA."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            # Most measurements also run on a GPU machine with PyTorch alone.
            continue
    return {**versions, "cuda": torch.version.cuda} if torch.version.cuda else versions


MFU_CONVENTION = (
    "6 FLOPs per matmul parameter and token it is applied to, plus attention, halved where it is "
    "causal; real tokens only, recomputation not counted; of the dense bf16 peak"
)


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Measurements of a recipe's steps on one device. Quartiles are over steps."""

    device: str
    parameters: int
    """Number of trainable parameters."""
    batch_size: int
    micro_batches: float
    """Mean number of micro-batches per step."""
    sequences_per_second: Quartiles
    tokens_per_second: Quartiles
    """Tokens without padding."""
    positions_per_second: Quartiles
    """Tokens including padding."""
    padding: float
    """Share of positions that are padding."""
    flops_per_token: float
    """Forward and backward FLOPs per token without padding."""
    mfu: Quartiles | None
    """None if the device's peak is unknown."""
    mfu_convention: str
    peak_flops: float | None
    """Dense bf16 peak of the device in FLOP/s."""
    peak_memory_bytes: int
    """Peak over all steps, including warm-up. On a GPU this is device memory, otherwise the memory
    of the process, including model construction."""
    seconds: Quartiles
    """Seconds per step, until the device has finished it."""
    seconds_by_phase: Mapping[str, Quartiles]
    """Keys: collating, forward_backward, clip_optimizer. The rest of a step is bookkeeping."""
    seconds_warming_up: float
    """Seconds of all warm-up steps, including compilation."""
    loss: float
    """Loss of the last step."""
    substitutions: tuple[str, ...]
    """A line for each requested feature that this machine lacks, with its replacement."""


@dataclass(frozen=True)
class _TimedStep:
    record: StepRecord
    seconds: float
    """Seconds since the end of the previous step, on the device."""

    @property
    def positions(self) -> float:
        return self.record.batch_tokens / (1 - self.record.padding)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase."""
        record = self.record
        return {
            "collating": record.seconds_collating,
            "forward_backward": record.seconds_in_model,
            # The device may still update weights after the host has finished the step.
            "clip_optimizer": record.seconds_in_optimizer + self.seconds - record.seconds,
        }


def measure_steps(recipe: Recipe, samples: Samples, *, warm_up: int) -> StepFigures:
    """Train on `samples` and return measurements of the steps after the first `warm_up` ones.

    Raises:
        TrainingError: the loss is not finite, and the recipe does not skip such steps.
        UserError: the recipe divides samples among workers, but this is a single process.
    """
    for key in ("tensor", "pipeline"):
        if (size := getattr(recipe.parallel, key)) > 1:
            raise UserError(
                f"parallel.{key}: {size}: expected 1: the benchmark runs in one process"
            )
    # A run divides the cores among the workers of a machine; here one process has all of them.
    torch.set_num_threads(recipe.workers.threads or len(os.sched_getaffinity(0)))
    device, workload = current_device(), recipe.workload
    recipe = settle(recipe, device)
    # The schedule must cover all measured steps, however few the recipe has.
    extended_recipe = recipe.model_copy(
        update={"steps": max(recipe.steps or 0, len(samples.steps)), "phases": ()}
    )
    with lone_group(device):
        parallel_model = build_divided_model(
            extended_recipe, samples.vocabulary, samples.seq_len, device, 1
        )
        model = parallel_model.model
        optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
        masks = build_masks(extended_recipe, parallel_model)
        loop = build_loop(
            extended_recipe, parallel_model.clip, samples.vocabulary, device, 1, masks=masks
        )
        run = loop.run(parallel_model.forward_backward, optimizer, samples.steps, Start())
        timed_steps = list(_time_steps((record for record, _ in run), device))
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    figures = _summarise(timed_steps, warm_up, device, parameters)
    return replace(
        figures, substitutions=tuple(missing_features(recipe, probe_capabilities(recipe, device)))
    )


def _time_steps(records: Iterable[StepRecord], device: torch.device) -> Iterator[_TimedStep]:
    """Yield the records with the seconds between the ends of steps."""
    start_time = time.perf_counter()
    for record in records:
        if device.type == "cuda":
            # The host runs ahead of the device; without a wait, only launches would be timed.
            torch.cuda.synchronize(device)
        end_time = time.perf_counter()
        yield _TimedStep(record, end_time - start_time)
        start_time = end_time


def _summarise(
    timed_steps: Sequence[_TimedStep], warm_up: int, device: torch.device, parameters: int
) -> StepFigures:
    """Return the figures over the steps after warm-up."""
    measured_steps = timed_steps[warm_up:]
    tokens = sum(step.record.batch_tokens for step in measured_steps)

    def over_steps(value: Callable[[_TimedStep], float]) -> Quartiles:
        return quartiles([value(step) for step in measured_steps])

    peak = peak_flops(device)
    return StepFigures(
        device=device_name(device),
        parameters=parameters,
        batch_size=measured_steps[0].record.batch_samples,
        micro_batches=sum(step.record.micro_batches for step in measured_steps)
        / len(measured_steps),
        sequences_per_second=over_steps(lambda step: step.record.batch_samples / step.seconds),
        tokens_per_second=over_steps(lambda step: step.record.batch_tokens / step.seconds),
        positions_per_second=over_steps(lambda step: step.positions / step.seconds),
        padding=1 - tokens / sum(step.positions for step in measured_steps),
        flops_per_token=sum(step.record.flops for step in measured_steps) / tokens,
        mfu=over_steps(lambda step: step.record.flops / step.seconds / peak) if peak else None,
        mfu_convention=MFU_CONVENTION,
        peak_flops=peak,
        peak_memory_bytes=peak_memory_bytes(device),
        seconds=over_steps(lambda step: step.seconds),
        seconds_by_phase={
            name: quartiles([step.phases[name] for step in measured_steps])
            for name in measured_steps[0].phases
        },
        seconds_warming_up=sum(step.seconds for step in timed_steps[:warm_up]),
        loss=measured_steps[-1].record.loss,
        substitutions=(),
    )
