"""Clipping by bucket: its schedule, its cost, and its effect on the loss.

    python benchmarks/clipping.py ../shared/data/wikitext

On two gloo ranks, or on one NCCL rank per GPU if there are GPUs, with BERT-tiny on WikiText's
paragraphs and definitions of Python's library:

- order: the reductions and clippings of one profiled step, in the order in which they start, in
  milliseconds since the start of the backward pass. FSDP2 waits for each gloo collective, so
  nothing overlaps on a CPU: this shows only that clipping runs within the backward pass, between
  the reductions. A run on several GPUs shows whether its time is hidden.
- seconds: a step with each clipping method; the methods take turns in every round.
- clip_seconds: the profiled seconds per step in the clipping of buckets, and after the backward
  pass.
- losses: a run with each method and seed over the same batches; with the first seed also at one
  rank.

Writes benchmarks/results/clipping.json and clipping-loss.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import (
    RESULTS,
    medians,
    on_ranks,
    parser_of,
    picture,
    prepare_natural_lengths,
    write_result,
)
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.mesh import rank_mesh
from elastrata.parallel.parallelize import parallelize
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.step.bucket_clip import RANGE
from elastrata.step.clip import Clip, build_clip
from elastrata.step.forward_backward import WholeModel
from elastrata.step.train_step import train_step
from elastrata.trainer.preflight import find_training_data
from elastrata.trainer.trainer import Loop
from elastrata_pipelines.batches import Start
from elastrata_pipelines.payload import RankStep, decode

WAYS = {
    "none": {"method": "none"},
    "global_norm": {"method": "global_norm"},
    "reduced": {"method": "bucketwise", "scope": "reduced"},
    "local": {"method": "bucketwise", "scope": "local"},
}
# Short turns, so that all methods see the same load of the machine.
WARM_UP_STEPS, STEPS_PER_TURN, LAST_STEPS, CURVE_POINTS = 5, 10, 50, 50
PROFILED_STEPS, REFERENCE = 5, "global_norm"
COLORS = {"none": "tab:gray", REFERENCE: "tab:blue", "reduced": "tab:orange", "local": "tab:red"}
AFTER = "clip.after_backward"
"""Name in profiles of the work that remains after the backward pass."""
# Prefix of the profiler's events for nodes of the backward pass.
NODE = "autograd::engine::evaluate_function"
EVENTS = {
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    RANGE: "clip",
}
"""Kinds of events, by their names in a profile."""

Run = Sequence[tuple[float, float]]
"""Loss and gradient norm of every step."""


def recipe_with(arguments: argparse.Namespace, way: str, seed: int = 0) -> Recipe:
    clip = json.dumps({**WAYS[way], "max_norm": arguments.max_norm})
    overrides = [
        f"data.path={arguments.data}",
        f"steps={arguments.steps}",
        f"seed={seed}",
        f"clip={clip}",
        "batch_size=24",
        "micro_batch_tokens=8192",
        f"schedule.warmup_steps={arguments.steps // 10}",
        "optimizer.lr=2e-3",
    ]
    return load_recipe("bert/tiny", overrides)


def steps_of(recipe: Recipe, rank: int, ranks: int) -> Iterator[RankStep]:
    """Yield this rank's part of every step."""
    batches = find_training_data(recipe).train
    for group in batches.groups(
        Start(), steps=recipe.steps, batch_size=recipe.batch_size, max_tokens=2**16
    ):
        payloads = batches.payloads(group, ranks)
        # Payloads come in the order of ranks.
        for payload in islice(payloads, rank, rank + 1):
            yield from decode(payload, batches.manifest.token_dtype)


def model_of(recipe: Recipe, device: torch.device, ranks: int) -> nn.Module:
    manifest = find_training_data(recipe).train.manifest
    torch.manual_seed(recipe.seed)
    with device:
        model = recipe.workload.build_model(manifest.vocabulary, manifest.seq_len)
    return parallelize(
        model,
        recipe.workload.blocks(model),
        rank_mesh(device.type, ranks, 1),
        precision=recipe.precision,
        activation_checkpointing="none",
        compile=False,
        parallel=recipe.parallel,
    )


class Ranged:
    """A clip whose work after the backward pass has a name in profiles."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        with record_function(AFTER):
            return self._clip.after_backward()


class Steps:
    """Repeats one step with one clipping method."""

    def __init__(self, recipe: Recipe, device: torch.device, rank: int, ranks: int) -> None:
        vocabulary = find_training_data(recipe).train.manifest.vocabulary
        part = next(steps_of(recipe, rank, ranks))
        self._batches = [
            recipe.workload.collate(rows, vocabulary, recipe.seed).to(device)
            for rows in part.micro_batches
        ]
        weight = torch.tensor(sum(batch.weights["mlm"] for batch in self._batches), device=device)
        # Loss weights count the predictions of all ranks.
        dist.all_reduce(weight)
        self._weights = {"mlm": float(weight)}
        model = model_of(recipe, device, ranks)
        self._forward_backward = WholeModel(model, recipe.workload)
        blocks = recipe.workload.blocks(model)
        self._optimizer = build_optimizer(recipe.optimizer, model, blocks)
        self._clip = Ranged(build_clip(recipe.clip, model))

    def take(self, steps: int) -> list[float]:
        """Run some steps and return the seconds of each."""
        seconds = []
        for _ in range(steps):
            dist.barrier()
            # After a barrier, so that no rank's time includes waiting for a late one.
            started = time.perf_counter()
            train_step(
                self._forward_backward,
                self._optimizer,
                self._batches,
                weights=self._weights,
                clip=self._clip,
            )
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds


def profiled_order(steps: Steps) -> dict[str, Any]:
    """Return the times of reductions and clippings in one step, on this rank's host."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps.take(1)
    nodes = [event.time_range for event in profiled.events() if event.name.startswith(NODE)]
    backward_start, backward_end = (
        min(node.start for node in nodes),
        max(node.end for node in nodes),
    )
    events = sorted(
        (event.time_range.start, event.time_range.end, EVENTS[event.name])
        for event in profiled.events()
        if event.name in EVENTS and event.time_range.start >= backward_start
    )
    clips = [start for start, _, what in events if what == "clip"]
    last_reduction = max((s for s, _, what in events if what == "reduce_scatter"), default=0)
    return {
        "clips": len(clips),
        "clips_before_the_last_gradient": sum(start < backward_end for start in clips),
        "clips_before_the_last_reduction": sum(start < last_reduction for start in clips),
        "gradients_end_ms": round((backward_end - backward_start) / 1000, 3),
        "events_start_end_ms": [
            [
                what,
                round((start - backward_start) / 1000, 3),
                round((end - backward_start) / 1000, 3),
            ]
            for start, end, what in events
        ],
    }


def clip_seconds(steps: Steps) -> dict[str, float]:
    """Return the seconds of clipping per step, a mean over several steps, on this rank's host."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        steps.take(PROFILED_STEPS)
    seconds_by_range = {RANGE: 0.0, AFTER: 0.0}
    for event in profiled.events():
        if event.name in seconds_by_range:
            seconds_by_range[event.name] += event.time_range.elapsed_us() / 1e6 / PROFILED_STEPS
    return {
        "in_buckets": round(seconds_by_range[RANGE], 6),
        "after_the_backward_pass": round(seconds_by_range[AFTER], 6),
    }


def measure_steps(
    arguments: argparse.Namespace, device: torch.device, rank: int, ranks: int
) -> dict[str, Any]:
    """Measure order and seconds; the methods take turns."""
    steps = {way: Steps(recipe_with(arguments, way), device, rank, ranks) for way in WAYS}
    for turn in steps.values():
        turn.take(WARM_UP_STEPS)
    rounds = [
        {way: statistics.median(turn.take(STEPS_PER_TURN)) for way, turn in steps.items()}
        for _ in range(arguments.rounds)
    ]
    return {
        "order": {way: profiled_order(steps[way]) for way in WAYS},
        "clip_seconds": {way: clip_seconds(steps[way]) for way in WAYS},
        "seconds": medians(rounds, 5),
        # Ratios within a round: the load of the machine cancels out.
        "over_none": medians([{w: r[w] / r["none"] for w in WAYS} for r in rounds], 4),
    }


def measure_losses(
    arguments: argparse.Namespace, device: torch.device, rank: int, ranks: int
) -> dict[str, Run]:
    """Return loss and gradient norm of every step of every run.

    With a single rank, only for the first seed.
    """
    runs = {}
    # A single rank only serves to compare the first seed.
    for seed in range(arguments.seeds if ranks > 1 else 1):
        for way in WAYS:
            recipe = recipe_with(arguments, way, seed)
            model = model_of(recipe, device, ranks)
            loop = Loop(
                workload=recipe.workload,
                vocabulary=find_training_data(recipe).train.manifest.vocabulary,
                seed=recipe.seed,
                learning_rate=recipe.learning_rate,
                clip=build_clip(recipe.clip, model),
                on_nonfinite=recipe.on_nonfinite,
                device=device,
                world_size=ranks,
            )
            blocks = recipe.workload.blocks(model)
            optimizer = build_optimizer(recipe.optimizer, model, blocks)
            parts = steps_of(recipe, rank, ranks)
            forward_backward = WholeModel(model, recipe.workload)
            records = loop.run(forward_backward, optimizer, parts, Start())
            runs[f"{way}, seed {seed}"] = [(r.loss, r.gradient_norm) for r, _ in records]
    return runs


MEASUREMENTS = {"steps": measure_steps, "losses": measure_losses}


def on_rank(
    rank: int, measurement: str, ranks: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    return MEASUREMENTS[measurement](arguments, device, rank, ranks)


def measured_on(ranks: int, measurement: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of rank 0."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    first, *_ = on_ranks(ranks, on_rank, measurement, ranks, arguments, backend=backend)
    figures: dict[str, Any] = first
    return figures


def compare(alone: Mapping[str, Run], several: Mapping[str, Run]) -> dict[str, Any]:
    """Return the figures of the runs at all ranks, compared with those at one rank."""
    return {name: summary(run, alone.get(name)) for name, run in several.items()}


def summary(run: Run, alone: Run | None) -> dict[str, Any]:
    """Return the figures of one run."""
    losses, norms = (list(values) for values in zip(*run, strict=True))
    figures = {
        "last_loss": round(statistics.fmean(losses[-LAST_STEPS:]), 4),
        "mean_gradient_norm": round(statistics.fmean(norms), 4),
        "curve": [round(value, 4) for value in span_means(losses)],
    }
    if alone is None:
        return figures
    pairs = zip(losses, (loss for loss, _ in alone), strict=True)
    return figures | {
        "last_loss_at_one_rank": round(
            statistics.fmean(loss for loss, _ in alone[-LAST_STEPS:]), 4
        ),
        "largest_relative_difference_to_one_rank": max(abs(a - b) / b for a, b in pairs),
    }


def span_means(losses: Sequence[float]) -> list[float]:
    """Return the mean losses over equal spans of steps."""
    return [float(part.mean()) for part in np.array_split(np.array(losses), CURVE_POINTS)]


def draw(runs: Mapping[str, Run], path: Path) -> None:
    """Draw the losses of all runs, and below their differences from `global_norm` with the same
    seed."""
    figure = picture(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    curves = {name: np.array(span_means([loss for loss, _ in run])) for name, run in runs.items()}
    steps = np.linspace(0, len(next(iter(runs.values()))), CURVE_POINTS)
    for name, curve in curves.items():
        way, seed = name.split(", ")
        style = {"color": COLORS[way], "linestyle": "-" if seed == "seed 0" else "--"}
        above.plot(steps, curve, label=name, **style)
        below.plot(steps, curve - curves[f"{REFERENCE}, {seed}"], **style)
    span = len(next(iter(runs.values()))) // CURVE_POINTS
    above.set_ylabel(f"loss (nats), mean of {span} steps")
    above.legend(frameon=False, ncols=2)
    below.set_ylabel(f"above {REFERENCE}")
    below.set_xlabel("optimizer step")
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__, rounds=9, wikitext=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count() or 2
    with tempfile.TemporaryDirectory() as scratch:
        arguments.data = prepare_natural_lengths(arguments.wikitext, Path(scratch) / "data")
        step_figures = measured_on(ranks, "steps", arguments)
        runs_alone, runs_on_all = (measured_on(n, "losses", arguments) for n in (1, ranks))
    draw(runs_on_all, RESULTS / "clipping-loss.png")
    figures = {
        "ranks": ranks,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **step_figures,
        "losses": compare(runs_alone, runs_on_all),
    }
    write_result("clipping", figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
