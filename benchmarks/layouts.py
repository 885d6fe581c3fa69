"""Memory and time of steps under several layouts, measured on this machine, beside the planner's.

    PYTHONPATH=tests python benchmarks/layouts.py [--only NAME...]

A GPT of 12 million parameters on CPU processes of one thread each, which run the engine's own
loop over random samples of full length. Memory is the largest resident set of the process that
needs most; what Python, PyTorch and gloo take is what a process has with a model of nearly nothing
in the end: the planner's term `reserved`. Memory that is freed goes back to the system at once
(MALLOC_MMAP_THRESHOLD_), as PyTorch's allocator for CPUs keeps none. Rates of the core (matrix
products, copies) are measured first, by PyTorch alone. Writes results/layouts.json; what is not
measured again stays in it. A layout takes half a minute on two idle cores, minutes on busy ones.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import known_result, parser_of, write_result

from support.ranks import run_fresh_ranks

NEW = {
    "workload.num_layers": 6,
    "workload.hidden_size": 384,
    "workload.num_heads": 6,
    "workload.max_positions": 256,
    "workload.embedding_multiple": 64,
    "data.path": "nowhere",
    "data.prepare.seq_len": 256,
    "data.prepare.tokenizer.vocab_size": 4096,
    "optimizer.fused": "false",
    "workers.threads": 1,
}
NOTHING = {"workload.num_layers": 1, "workload.hidden_size": 12, "data.prepare.seq_len": 8}
STEPS = 2
MIB = 2**20
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "one process, two micro-batches": (1, {"micro_batch_tokens": 1024}),
    "one process, recomputed": (1, {"activation_checkpointing": "full"}),
    "one process, selective": (1, {"activation_checkpointing": "selective"}),
    "two shards": (2, {}),
    "two shards, kept": (2, {"parallel.reshard_after_forward": "false"}),
    "two shards, two micro-batches": (2, {"micro_batch_tokens": 1024}),
    "two copies": (2, {"parallel.replicate": "all"}),
    "tensor": (2, {"parallel.tensor": 2}),
    "tensor and sequence": (2, {"parallel.tensor": 2, "parallel.sequence": "true"}),
}
"""Processes, and what differs. Every process computes 2,048 tokens a step, or its half of them
with each neighbour of its tensor-parallel group."""
TOKENS = 2048


def recipe_of(name: str, changes: dict[str, Any]) -> Any:
    """A recipe; rules about runs through Ray do not count here."""
    from elastrata.recipe.recipe import Recipe
    from elastrata.recipe.yaml_reader import read_recipe_text

    processes, different = LAYOUTS[name]
    values = {**NEW, "micro_batch_tokens": TOKENS, **different, **changes}
    overrides = [f"{key}={value}" for key, value in values.items()]
    text = read_recipe_text("gpt/tiny", overrides, model=Recipe)
    recipe = Recipe.model_validate(text.values)
    seq_len = recipe.data.prepare.seq_len  # type: ignore[union-attr]
    ranks = processes // recipe.parallel.tensor
    return recipe.model_copy(update={"batch_size": TOKENS // seq_len * ranks, "steps": 100})


def train(
    rank: int, processes: int, name: str, changes: dict[str, Any]
) -> tuple[float, float, float]:
    """One process: some steps. Bytes at its peak, and in the end; seconds of the last step."""
    import torch

    from elastrata.bench.samples import bench_samples
    from elastrata.core.control_signal import Action
    from elastrata.core.optimizer import build_optimizer
    from elastrata.trainer.engine import divided_model, training_loop
    from elastrata_pipelines.batches import Start

    recipe = recipe_of(name, changes)
    ranks = processes // recipe.parallel.tensor
    own = recipe.model_copy(update={"batch_size": recipe.batch_size // ranks})
    samples = bench_samples(own, "full", steps=STEPS)
    device = torch.device("cpu")
    divided = divided_model(recipe, samples.vocabulary, samples.seq_len, device, processes)
    optimizer = build_optimizer(recipe.optimizer, divided.model, divided.blocks)
    loop = training_loop(recipe, divided.clip, samples.vocabulary, device, processes)
    seconds, began = [], time.perf_counter()
    for _ in loop.run(
        divided.forward_backward, optimizer, samples.steps, Start(), lambda: Action.GO_ON
    ):
        seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    resident = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        * resource.getpagesize()
    )
    return peak, resident, seconds[-1]


def measured(name: str, changes: dict[str, Any]) -> tuple[float, float, float]:
    """The most bytes of a process at its peak, and in the end; the seconds of the slowest."""
    ranks = run_fresh_ranks(LAYOUTS[name][0], train, name, changes)
    peak, resident, seconds = map(max, zip(*ranks, strict=True))
    return peak, resident, seconds


def rates() -> tuple[float, float]:
    """FLOP/s and bytes/s of one thread."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(2048, 384), torch.randn(384, 1536)
    big = torch.randn(2**23)
    flops, copies = [], []
    for _ in range(7):
        began = time.perf_counter()
        a @ b
        flops.append(2 * 2048 * 384 * 1536 / (time.perf_counter() - began))
        began = time.perf_counter()
        big + 1.0
        copies.append(2 * 4 * 2**23 / (time.perf_counter() - began))
    return statistics.median(flops), statistics.median(copies)


def predicted(name: str, reserved: float, flops: float, copied: float) -> tuple[Any, Any]:
    """The planner's memory and time."""
    from elastrata.core.device import Peak
    from elastrata.core.workload import model_spec
    from elastrata.planner.cluster import Cluster
    from elastrata.planner.devices import CPU, DEVICES
    from elastrata.planner.layout import Layout
    from elastrata.planner.memory import memory
    from elastrata.planner.operations import Machine
    from elastrata.planner.stack import elastrata
    from elastrata.planner.step_time import step_time
    from elastrata.recipe.data_spec import data_spec

    recipe, processes = recipe_of(name, {}), LAYOUTS[name][0]
    outline = data_spec(recipe)
    model = model_spec(recipe.workload, outline.vocabulary, outline.seq_len)
    tensor, is_copy = recipe.parallel.tensor, recipe.parallel.replicate == "all"
    data = processes // tensor
    layout = Layout(
        tensor=tensor,
        sequence=recipe.parallel.sequence,
        shards=1 if is_copy else data,
        copies=data if is_copy else 1,
        micro_batch=recipe.micro_batch_tokens // model.seq_len,
        checkpointing=recipe.activation_checkpointing,
        reshard=recipe.parallel.reshard_after_forward,
    )
    core = replace(
        DEVICES["CPU"],
        peak=Peak(flops, "fp32"),
        memory_bandwidth=copied,
        reserved_bytes=reserved,
    )
    stack = replace(elastrata("fp32", "fp32"), fragmentation=0.0)
    reached = replace(CPU, matmul=1.0, memory=1.0, attention=0.5)
    cluster = Cluster(device=core, devices=processes, per_node=processes)
    machine = Machine(core, replace(reached, link=1.0), stack)
    return (
        memory(model, core, stack, layout, recipe.batch_size),
        step_time(model, cluster, machine, layout, recipe.batch_size),
    )


def main() -> None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(256 * 1024)
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    chosen: list[str] = parser.parse_args().only
    known = known_result("layouts")
    before, reserved = known.get("layouts", {}), known.get("reserved_mib", {})
    for processes, name in (("1", "one process"), ("2", "two shards")):
        if processes not in reserved or len(chosen) == len(LAYOUTS):
            reserved[processes] = round(measured(name, NOTHING)[1] / MIB, 1)
    flops, copied = rates()
    for name in chosen:
        peak, _, seconds = measured(name, {})
        own = reserved[str(LAYOUTS[name][0])] * MIB
        memory, step = predicted(name, own, flops, copied)
        before[name] = {
            "measured_mib": round(peak / MIB, 1),
            "predicted_mib": round(memory.total / MIB, 1),
            "error": round(memory.total / peak - 1, 4),
            "terms_mib": {key: round(value / MIB, 1) for key, value in vars(memory).items()},
            "measured_seconds": round(seconds, 3),
            "predicted_seconds": round(step.total, 3),
            "gflops": round(flops / 1e9, 1),
        }
        print(name, before[name], flush=True)
        found = {name: before[name] for name in LAYOUTS if name in before}
        figures = {"reserved_mib": reserved, "layouts": found}
        write_result("layouts", figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
