"""The cases that are measured: how fast, and how much memory it takes.

A case is a function, run in a process of its own, whose result is a row. Beside its own arguments
it takes what `gpu.py` tells every case (`gpu_told.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from clip_overlap import profiled_clip
from gpu_engine import engine, steps_after
from gpu_process import Row
from gpu_told import Told
from padded_bert import PaddedBert, attention_by, padded_attention, padded_recipe
from torch.profiler import ProfilerActivity, profile
from two_four_products import products

from elastrata.bench.samples import Samples, bench_samples
from elastrata.bench.step import MFU_CONVENTION, measure_steps
from elastrata.core.device import current_device, device_name, peak_flops
from elastrata.core.mesh import lone_group
from elastrata.core.workload import model_spec
from elastrata.planner.choice import group_cluster, group_layout, phase_choices
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe

TOKENS = 131_072
"""Of a step: several micro-batches, so that the update counts as little as in training."""
WARM_UP, STEPS = 3, 8
TRACED_AFTER = 3


def machine(**told: Any) -> Row:
    """The machine and its software."""
    Told(**told)
    device = current_device()
    about: Row = {
        "device": device_name(device),
        "peak_flops": peak_flops(device),
        "mfu_convention": MFU_CONVENTION,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "cuda": torch.version.cuda,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["memory_bytes"] = properties.total_memory
        about["multiprocessors"] = properties.multi_processor_count
    return about


def steps(
    *,
    model: str,
    overrides: Sequence[str],
    lengths: str = "full",
    padded: bool = False,
    aim: float | None = None,
    published: float | None = None,
    **told: Any,
) -> Row:
    """`elastrata bench step`, with the memory that the plan has for it.

    Args:
        model: its recipe.
        overrides: of it.
        lengths: of the samples.
        padded: whether they are padded, with dense attention, as most code trains.
        aim: the MFU that is hoped for.
        published: sequences per second to compare with.
        told: see `Told`.
    """
    wanted = Told(**told)
    recipe = wanted.recipe(model, [*_samples_of_a_step(wanted, model), *overrides])
    histogram = wanted.lengths(lengths)
    if padded:
        recipe = padded_recipe(recipe, histogram)
    counts = (WARM_UP, STEPS) if wanted.is_measured else (1, 2)
    samples = bench_samples(recipe, histogram, steps=sum(counts))
    plan, allocated = _plan_bytes(recipe, samples)
    row: Row = {"layers": recipe.workload.num_layers, "precision": recipe.precision} | {
        "compile": recipe.compile,
        "micro_batch_tokens": recipe.micro_batch_tokens,
        "plan_bytes": round(plan),
        "plan_allocated_bytes": round(allocated),
        "aim": aim,
    }
    _refuse_what_cannot_fit(plan)
    is_padded = isinstance(recipe.workload, PaddedBert)
    with attention_by(padded_attention) if is_padded else nullcontext():
        figures = asdict(measure_steps(recipe, samples, warm_up=counts[0]))
    del figures["mfu_convention"]
    row |= {**figures, "allocated_bytes": figures.pop("peak_memory_bytes")}
    if current_device().type == "cuda":
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    if published:
        rate = figures["sequences_per_second"]["median"]
        row["over_published"] = round(rate / published, 3)
    return row


def _samples_of_a_step(wanted: Told, model: str) -> list[str]:
    if wanted.is_tiny or not model.startswith("gpt/"):
        return []
    recipe = load_recipe(model, [])
    tokens = TOKENS if wanted.is_measured else 2 * recipe.micro_batch_tokens
    return [f"batch_size={tokens // recipe.data.prepare.seq_len}"]


def _plan_bytes(recipe: Recipe, samples: Samples) -> tuple[float, float]:
    """The plan's memory of a step on one device; and without what it has for the driver and for
    the allocator."""
    device = current_device()
    name = device_name(device) if device.type == "cuda" else "CPU"
    spec = model_spec(recipe.workload, samples.vocabulary, samples.seq_len)
    layout = group_layout(recipe.parallel, 1)
    tokens = recipe.micro_batch_tokens
    choices = phase_choices(recipe, recipe, spec, (tokens,), layout, group_cluster(name, 1, 1))
    (choice,) = choices.all
    planned = choices.bytes(choice)
    wasted = 1 + choices.machine.stack.fragmentation
    return planned, (planned - choices.cluster.device.reserved_bytes) / wasted


def _refuse_what_cannot_fit(plan: float) -> None:
    """Minutes of building and compiling are not spent on what is to run out of memory anyway."""
    if current_device().type == "cuda":
        free, _ = torch.cuda.mem_get_info()
        if plan > 1.1 * free:
            raise torch.OutOfMemoryError(f"the plan has {plan:.4g} bytes, {free:.4g} are free")


def trace(*, model: str, overrides: Sequence[str], lengths: str, **told: Any) -> Row:
    """A profile of one step of two micro-batches: its trace as a file, and the longest kernels."""
    wanted = Told(**told)
    recipe = wanted.recipe(model, overrides)
    mean = recipe.data.prepare.seq_len if lengths == "full" else 256
    size = max(2, 2 * recipe.micro_batch_tokens // mean)
    recipe = recipe.model_copy(update={"batch_size": size} if not wanted.is_tiny else {})
    samples = bench_samples(recipe, wanted.lengths(lengths), steps=TRACED_AFTER + 1)
    file = Path(wanted.folder, f"trace-{model.replace('/', '-')}.json.gz")
    with lone_group(current_device()):
        run = steps_after(*engine(recipe, samples, current_device()), samples, 0)
        for _ in range(TRACED_AFTER):
            next(run)
        with profile(activities=_activities()) as profiled:
            record = next(run)
            _wait()
    profiled.export_chrome_trace(str(file))
    by = "self_device_time_total" if current_device().type == "cuda" else "self_cpu_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, by))[:15]
    longest = [
        {"name": event.key[:120], "count": event.count, "ms": round(getattr(event, by) / 1e3, 3)}
        for event in events
    ]
    return {"file": file.name, "seconds": record.seconds, "longest": longest}


def _activities() -> list[ProfilerActivity]:
    on_device = [ProfilerActivity.CUDA] if current_device().type == "cuda" else []
    return [ProfilerActivity.CPU, *on_device]


def two_four_products(*, model: str, **told: Any) -> Row:
    """Every layer's products with 2:4 kernels beside dense ones."""
    wanted = Told(**told)
    repeats = 1 if wanted.is_tiny else 20
    found = products(wanted.recipe(model), repeats, lambda function, *args: function(*args))
    return {"products": list(found)}


def clip_beside(*, model: str, overrides: Sequence[str], lengths: str, **told: Any) -> Row:
    """The share of clipping that lies beside other work."""
    wanted = Told(**told)
    recipe = wanted.recipe(model, overrides)
    return {"clip": profiled_clip(recipe, wanted.lengths(lengths))}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
