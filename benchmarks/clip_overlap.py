"""How much of the clipping of gradients lies beside other work, from a trace of PyTorch's profiler.

On a GPU by kernels: those launched inside a range of clipping, beside all others, of computing
(backward pass and the rest) and of communication (NCCL). On a CPU, where there are no kernels and
nothing runs beside anything else, by where the ranges lie: inside the backward pass or after it.
"""

from __future__ import annotations

import bisect
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from elastrata.bench.samples import bench_samples
from elastrata.core.bucket_clip import RANGE
from elastrata.core.clip import Clip
from elastrata.core.control_signal import Action
from elastrata.core.device import current_device
from elastrata.core.mesh import lone_group
from elastrata.core.optimizer import build_optimizer
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.engine import divided_model, training_loop
from elastrata_pipelines.batches import Start

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BACKWARD = "autograd::engine::evaluate_function"
_PROFILED_AFTER = 3
Interval = tuple[float, float]
"""Start and end in microseconds."""


@dataclass(frozen=True)
class _Launch:
    thread: Any
    time: float


class RangedClip:
    """A clip whose end, too, has a name in a profile."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        with record_function(RANGE):
            return self._clip.after_backward()


def profiled_clip(recipe: Recipe, lengths: str) -> dict[str, Any]:
    """The share of clipping beside other work in one step."""
    length = {"steps": 100, "epochs": None, "tokens": None}  # whatever the recipe's data would make
    recipe = recipe.model_copy(update=length)
    device, workload = current_device(), recipe.workload
    samples = bench_samples(recipe, lengths, steps=_PROFILED_AFTER + 1)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with lone_group(device), tempfile.TemporaryDirectory() as folder:
        divided = divided_model(recipe, samples.vocabulary, samples.seq_len, device, 1)
        blocks = workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        loop = training_loop(recipe, divided.clip, samples.vocabulary, device, 1)
        loop = replace(loop, clip=RangedClip(loop.clip))
        run = loop.run(
            divided.forward_backward, optimizer, samples.steps, Start(), lambda: Action.GO_ON
        )
        for _ in range(_PROFILED_AFTER):
            next(run)
        if device.type == "cuda":
            torch.cuda.synchronize()
        with profile(activities=activities) as profiled:
            next(run)
            if device.type == "cuda":
                torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return clip_overlap(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"], RANGE)


def clip_overlap(events: Sequence[Mapping[str, Any]], range_name: str) -> dict[str, Any]:
    """The time of the ranges of that name in the trace of one step.

    Args:
        events: `traceEvents` of a Chrome trace.
        range_name: of `record_function` around clipping.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    ranges = _by_thread(e for e in timed if e.get("name") == range_name and _on_host(e))
    kernels = [event for event in timed if event.get("cat") in _DEVICE]
    if kernels:
        return _of_kernels(timed, kernels, ranges)
    backward = [_interval(e) for e in timed if str(e.get("name", "")).startswith(_BACKWARD)]
    clips = merged(interval for of_thread in ranges.values() for interval in of_thread)
    window = [(min(start for start, _ in backward), max(end for _, end in backward))]
    return {
        "timeline": "host",
        "clip_ms": round(length(clips) / 1e3, 3),
        "share_inside_backward": share(clips, window),
    }


def _of_kernels(
    timed: Sequence[Mapping[str, Any]],
    kernels: Sequence[Mapping[str, Any]],
    ranges: Mapping[Any, list[Interval]],
) -> dict[str, Any]:
    launches = {
        event["args"]["correlation"]: _Launch(event.get("tid"), event["ts"])
        for event in timed
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    clips, communication, computing = [], [], []
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"))
        if launch and _inside(launch.time, ranges.get(launch.thread, [])):
            clips.append(_interval(kernel))
        elif "nccl" in kernel["name"].lower():
            communication.append(_interval(kernel))
        else:
            computing.append(_interval(kernel))
    clips = merged(clips)
    return {
        "timeline": "device",
        "clip_ms": round(length(clips) / 1e3, 3),
        "computing_ms": round(length(merged(computing)) / 1e3, 3),
        "communication_ms": round(length(merged(communication)) / 1e3, 3),
        "share_beside_computing": share(clips, computing),
        "share_beside_communication": share(clips, communication),
        "share_hidden": share(clips, [*computing, *communication]),
    }


def share(parts: Sequence[Interval], others: Iterable[Interval]) -> float | None:
    """The share of the parts' time, 0 to 1, in which one of the others is there too. None where the
    parts have no time."""
    whole, parts, others = length(parts), merged(parts), merged(others)
    both, place = 0.0, 0
    for start, end in parts:
        while place < len(others) and others[place][1] <= start:
            place += 1
        later = place
        while later < len(others) and others[later][0] < end:
            both += min(end, others[later][1]) - max(start, others[later][0])
            later += 1
    return round(both / whole, 4) if whole else None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """In order, those that touch made one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """The length of all intervals, those that overlap counted once."""
    return sum(end - start for start, end in merged(intervals))


def _by_thread(events: Iterable[Mapping[str, Any]]) -> dict[Any, list[Interval]]:
    found: dict[Any, list[Interval]] = {}
    for event in events:
        found.setdefault(event.get("tid"), []).append(_interval(event))
    return {thread: merged(intervals) for thread, intervals in found.items()}


def _inside(time: float, intervals: Sequence[Interval]) -> bool:
    """Whether it lies in one of the intervals, which are merged."""
    place = bisect.bisect_right(intervals, (time, float("inf"))) - 1
    return place >= 0 and time <= intervals[place][1]


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))


def _on_host(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("user_annotation", "cpu_op")
