"""Copies of states that tests take on fake CUDA."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elastrata.bench.samples import bench_samples
from elastrata.checkpoints.staging import Stager, state_bytes
from elastrata.checkpoints.state import training_state
from elastrata.optim.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.rehearsal.cuda import FakeStream
from elastrata.rehearsal.ledger import Ledger
from elastrata.trainer.build_model import build_divided_model
from elastrata.trainer.trainer import LoopHooks, build_loop
from elastrata_pipelines.batches import Start

CUDA = torch.device("cuda", 0)
BLOCKS, WIDTH, INNER, VOCABULARY = 32, 4096, 11008, 32000
"""Of Llama 7B."""


def copies_of_a_large_state(ledger: Ledger, ranks: int) -> dict[str, Any]:
    """Of 7 B parameters over so many ranks: the copies of a first save and of a second one."""
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("shard",))
    state = {"model": _shards(mesh), "optimizer": {"mean": _shards(mesh), "square": _shards(mesh)}}
    state["optimizer"]["step"] = {name: torch.zeros((), device=CUDA) for name in state["model"]}
    stager, saves, buffers = Stager(), [], []
    for step in (1, 2):
        ledger.take()
        copy = stager.stage(state, step)
        entries = ledger.take()
        saves.append([(c.direction, c.pinned, c.waits, c.count, c.bytes) for c in entries.copies])
        assert not entries.waits
        buffers.append([id(bucket.host) for bucket in copy._buckets])
        staged = copy.state["model"]["blocks.0.0"]
        assert isinstance(staged, DTensor)
        assert staged.to_local().device.type == "cpu"
        copy.release()
    return {
        "saves": saves,
        "bytes": state_bytes(state),
        "tensors": sum(len(part) for part in (state["model"],) * 4),
        "same memory": buffers[0] == buffers[1],
    }


def order_of_a_save_in_training(ledger: Ledger) -> list[str]:
    """The waits of streams, the copies and the updates of steps of which the first is saved."""
    recipe = load_recipe(
        "gpt/tiny",
        ["precision=bf16", "compile=false", "steps=100", "batch_size=8", "workload.num_layers=1"],
    )
    samples: Any = bench_samples(recipe, "full", steps=3)
    divided = build_divided_model(recipe, samples.vocabulary, samples.seq_len, CUDA, 8)
    blocks = recipe.workload.blocks(divided.model)
    optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
    loop = build_loop(recipe, divided.clip, samples.vocabulary, CUDA, 8)
    order: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: order.append("update"))
    stager = Stager()
    stage = stager.stage

    def before_change() -> None:
        with _noted(order):
            stager.before_change()

    run = loop.run(
        divided.forward_backward,
        optimizer,
        samples.steps,
        Start(),
        LoopHooks(before_change=before_change),
    )
    for number, _ in enumerate(run, 1):
        if number == 1:
            ledger.take()
            with _noted(order):
                stage(training_state(divided.model, optimizer), 1)
            order.append(f"copies to pinned memory: {_pinned(ledger)}")
    return order


def _pinned(ledger: Ledger) -> bool:
    copies = ledger.take().copies
    return bool(copies) and all(copy.pinned and not copy.waits for copy in copies)


def _noted(order: list[str]) -> Any:
    def noted(name: str) -> Any:
        return lambda stream, other: order.append(name)

    return patch.multiple(
        FakeStream,
        wait_stream=noted("the copies wait for the training"),
        wait_event=noted("the training waits for the copies"),
    )


def _shards(mesh: Any) -> dict[str, torch.Tensor]:
    shapes = {"embedding": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    inner = [*[(WIDTH, WIDTH)] * 4, *[(INNER, WIDTH)] * 2, (WIDTH, INNER), (WIDTH,), (WIDTH,)]
    for block in range(BLOCKS):
        shapes |= {f"blocks.{block}.{number}": shape for number, shape in enumerate(inner)}
    return {
        name: DTensor.from_local(
            torch.empty((shape[0] // mesh.size(), *shape[1:]), device=CUDA),
            mesh,
            [Shard(0)],
            run_check=False,
        )
        for name, shape in shapes.items()
    }
