"""Exchanges in two hops: equal to the bit to those at once, with few connections for each rank."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from elastrata.parallel.reduction import node_sizes
from support.exchange_ranks import PART, exchanged
from support.ranks import run_ranks

WORKERS = ("workers.min=1024", "workers.max=1024", "batch_size=1024")
LAYOUTS = {
    "bf16": ("parallel.reduce_dtype=bf16",),
    "virtual ranks": ("parallel.virtual_ranks=1024", "optimizer.fused=false", "workers.threads=1"),
    "axes": ("parallel.replicate=128", "parallel.tensor=2"),
}
_AT_1024_RANKS = """
import json, sys
from elastrata.rehearsal.process import load_shim
load_shim()
import torch
from elastrata.bench.samples import bench_samples
from elastrata.optim.optimizer import build_optimizer
from elastrata.step.train_step import total_weights, train_step
from elastrata.recipe.file import load_recipe
from elastrata.rehearsal.session import rehearsal
from elastrata.trainer.build_model import build_divided_model

RANKS = 1024
samples = bench_samples(load_recipe("gpt/125m", ["batch_size=2"]), "full", steps=1)

def rehearsed(overrides):
    recipe = load_recipe("gpt/125m", ["compile=false", "workload.num_layers=1", *overrides])
    with rehearsal(world_size=RANKS) as ledger:
        device = torch.device("cuda", 0)
        divided = build_divided_model(recipe, samples.vocabulary, samples.seq_len, device, RANKS)
        blocks = recipe.workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        batches = divided.forward_backward.ready([
            recipe.workload.collate(rows, samples.vocabulary, recipe.seed).to(device)
            for rows in samples.steps[0].micro_batches
        ])
        weights = total_weights(batches)
        train_step(divided.forward_backward, optimizer, batches, weights=weights, clip=divided.clip)
        kinds = {(c.kind, c.ranks) for c in ledger.entries.messages}
    exchanges = sorted(ranks for kind, ranks in kinds if "all_to_all" in kind or "alltoall" in kind)
    return exchanges, [[*group, count] for group, count in ledger.groups.items()]

print(json.dumps([rehearsed(overrides) for overrides in json.loads(sys.argv[1])]))
"""
Rehearsed = tuple[list[int], dict[tuple[str, int], int]]
"""The sizes of the groups of exchanges; and how many groups were made, by backend and size."""


@pytest.fixture(scope="module")
def at_1024_ranks() -> dict[str, Rehearsed]:
    wanted = [[*WORKERS, *overrides] for overrides in LAYOUTS.values()]
    command = [sys.executable, "-c", _AT_1024_RANKS, json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    return {
        name: (exchanges, {(backend, size): count for backend, size, count in groups})
        for name, (exchanges, groups) in zip(LAYOUTS, found, strict=True)
    }


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]], ids=str)
def test_two_hops_bring_what_one_exchange_brings(nodes: list[int]) -> None:
    for rank, found in enumerate(run_ranks(6, exchanged, nodes)):
        for hops, at_once in zip(found["hops"], found["at once"], strict=True):
            torch.testing.assert_close(hops, at_once, rtol=0, atol=0)
        parts = found["hops"][0].view(6, PART)
        for other, part in enumerate(parts):
            sent = torch.randn(6 * PART, generator=torch.Generator().manual_seed(other))
            assert torch.equal(part, sent.view(6, PART)[rank])


def test_ranks_of_uneven_nodes_are_told_apart() -> None:
    assert node_sizes(["a", "a", "b", "b"]) == [2, 2]
    assert node_sizes(["a", "b", "b", "a"]) == [1, 2, 1]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["bf16", "virtual ranks"])
def test_a_rank_of_1024_exchanges_with_its_node_and_one_rank_of_each_other(
    layout: str, at_1024_ranks: dict[str, Rehearsed]
) -> None:
    """134 peers in place of 1,023, and no group of gloo's beside the default one."""
    exchanges, groups = at_1024_ranks[layout]
    assert exchanges == [8, 128]
    assert groups == {("nccl", 8): 1, ("nccl", 128): 1}


@pytest.mark.matrix
def test_groups_along_the_axes_have_no_gloo(at_1024_ranks: dict[str, Rehearsed]) -> None:
    """Each would connect all of its ranks with one another."""
    _, groups = at_1024_ranks["axes"]
    assert groups == {("nccl", 128): 8, ("nccl", 4): 256, ("nccl", 2): 512}
