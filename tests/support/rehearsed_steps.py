"""Steps of the engine that tests take on fake CUDA."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from elastrata.bench.samples import bench_samples
from elastrata.bench.step import measure_steps
from elastrata.optim.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.rehearsal.ledger import Entries, Ledger
from elastrata.step.train_step import skips_on_device
from elastrata.trainer.build_model import build_divided_model, build_masks
from elastrata.trainer.trainer import build_loop
from elastrata_pipelines.batches import Start

CUDA = torch.device("cuda", 0)
STEPS = 3


def entries_of_a_step(
    ledger: Ledger, name: str, overrides: list[str]
) -> tuple[list[tuple[str, str, int]], list[tuple[str, bool, int]], bool]:
    """Of a recipe's third step: its waits by reason and line, its copies by direction with whether
    they wait, and whether the device itself skips updates."""
    entries, on_device = _third_step(ledger, name, overrides)
    waits = [(wait.reason, f"{wait.line} {wait.function}", wait.count) for wait in entries.waits]
    copies: Counter[tuple[str, bool]] = Counter()
    for copy in entries.copies:
        copies[copy.direction, copy.waits] += copy.count
    return waits, [(*key, count) for key, count in copies.items()], on_device


def peaks_before_and_in_training() -> tuple[int, int]:
    """The peaks of memory before steps are measured, and in them, in bytes."""
    from elastrata.rehearsal.session import rehearsal

    recipe = load_recipe("gpt/125m", ["compile=false", "workload.num_layers=2", "batch_size=4"])
    samples = bench_samples(recipe, "full", steps=2)
    with rehearsal(world_size=None) as ledger:
        building = torch.empty(2**33, dtype=torch.uint8, device="cuda")
        del building
        before = ledger.peak_bytes
        return before, measure_steps(recipe, samples, warm_up=1).peak_memory_bytes


def _third_step(ledger: Ledger, name: str, overrides: list[str]) -> tuple[Entries, bool]:
    recipe = load_recipe(name, ["precision=bf16", "compile=false", "steps=100", *overrides])
    samples: Any = bench_samples(recipe, "full", steps=STEPS + 1)
    world_size = dist.get_world_size()
    divided = build_divided_model(recipe, samples.vocabulary, samples.seq_len, CUDA, world_size)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    masks = build_masks(recipe, divided)
    loop = build_loop(recipe, divided.clip, samples.vocabulary, CUDA, world_size, masks=masks)
    run = loop.run(divided.forward_backward, optimizer, samples.steps, Start())
    for number, _ in enumerate(run, 1):
        entries = ledger.take()
        if number == STEPS:
            return entries, skips_on_device(optimizer, CUDA)
    raise AssertionError
