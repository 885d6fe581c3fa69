"""What one step takes in memory: by way of activation checkpointing, and with logits divided.

    python benchmarks/activation_memory.py

On CPUs, in fp32, with random tokens; every case has processes of its own, whose largest resident
memory is told, with the libraries (`empty`: a model of nearly nothing).

checkpointing: a GPT-2 of 8 blocks of width 512 and few ids, one process, 4,096 tokens at once.
logits: a GPT-2 of one narrow block that two ranks compute together (`parallel.tensor: 2`), 2,048
tokens at once. 50,257 ids are odd: each rank then has the whole table and all logits; with a row
more (`embedding_multiple: 2`) each has half of them.

Writes benchmarks/results/activation_memory.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from report import write_result

from elastrata.bench.samples import bench_samples
from elastrata.recipe.file import load_recipe
from elastrata.training.device import peak_memory_bytes
from elastrata.training.optimizer import build_optimizer
from elastrata.training.request import Act
from elastrata.workers.engine import divided_model, training_loop
from elastrata_pipelines.batches import Start

STEPS = 2
COMMON = ("precision=fp32", "compile=false", "workload.attention=dense", "workers.threads=1")
BLOCKS = (
    *("workload.hidden_size=512", "workload.num_layers=8", "workload.num_heads=8"),
    *("data.prepare.tokenizer.vocab_size=512", "data.prepare.seq_len=1024"),
    *("batch_size=4", "micro_batch_tokens=4096"),
)
HEAD = (
    *("workload.hidden_size=64", "workload.num_layers=1", "workload.num_heads=2"),
    *("data.prepare.seq_len=256", "batch_size=8", "micro_batch_tokens=2048"),
    *("workers.min=2", "workers.max=2", "parallel.tensor=2"),
)
EMPTY = ("workload.num_layers=1", "batch_size=1", "micro_batch_tokens=1024")


def peak(world_size: int, *overrides: str) -> dict[str, Any]:
    """The first rank's largest memory in bytes, and the loss of its last step."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, (world_size, folder, (*COMMON, *overrides)), nprocs=world_size)
        found: dict[str, Any] = torch.load(Path(folder) / "found.pt")
    print(overrides[-1], found, flush=True)
    return found


def _on_rank(rank: int, world_size: int, folder: str, overrides: Sequence[str]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    device, recipe = torch.device("cpu"), load_recipe("gpt/125m", list(overrides))
    samples = bench_samples(recipe, "full", steps=STEPS)
    vocabulary, counts = samples.vocabulary, rank == 0
    divided = divided_model(recipe, vocabulary, samples.seq_len, device, world_size)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    loop = training_loop(recipe, divided.clip, vocabulary, device, world_size, counts=counts)
    run = loop.run(divided.passes, optimizer, samples.steps, Start(), lambda: Act.GO_ON)
    loss = [record.loss for record, _ in run][-1]
    if rank == 0:
        found = {"peak_bytes": peak_memory_bytes(device), "loss": loss}
        torch.save(found, f"{folder}/found.pt")
    dist.destroy_process_group()


def main() -> None:
    ways = ("none", "selective", "full")
    checkpointing = {way: peak(1, *BLOCKS, f"activation_checkpointing={way}") for way in ways} | {
        "empty": peak(1, *BLOCKS, *EMPTY)
    }
    logits = {
        "whole": peak(2, *HEAD, "workload.embedding_multiple=1"),
        "divided": peak(2, *HEAD, "workload.embedding_multiple=2"),
    }
    write_result(
        "activation_memory", {"checkpointing": checkpointing, "logits": logits}, ("torch",)
    )


if __name__ == "__main__":
    main()
