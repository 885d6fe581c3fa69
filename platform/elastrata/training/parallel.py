"""Parallelism, applied to a plain model from outside, in one function whose order is its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from elastrata.recipe.config import Config
from elastrata.training.ordered_reduction import OrderedReduceScatter
from elastrata_pipelines.virtual_ranks import num_rounds

Precision = Literal["fp32", "bf16"]
DTYPES: Mapping[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What parameters are applied in."""


class ParallelConfig(Config):
    """How the workers divide the model among them."""

    replicate: PositiveInt = 1
    """HSDP: this many copies of the model, each sharded over workers / replicate. 1: FSDP."""
    virtual_ranks: PositiveInt | None = None
    """Divides every global batch into so many parts, whatever the number of workers, and adds up
    their gradients in the order of the parts: losses are then equal to the bit at any number of
    workers, at the price of a reduction for each part. A multiple of every number of workers is
    balanced best. Needs `workers.threads`, as sums inside an operator depend on its threads, and
    AdamW with `optimizer.fused: false`."""


def data_mesh(device_type: str, world_size: int, replicate: int) -> DeviceMesh:
    """The mesh of the data axis: [shard], or [replicate, shard] for HSDP.

    Where `replicate` does not divide the world size, as it may be for a while after a shrink, the
    model is sharded over all workers.
    """
    if replicate > 1 and world_size % replicate == 0:
        shape = (replicate, world_size // replicate)
        return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))


def parallelize(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    precision: Precision,
    activation_checkpointing: Literal["none", "full"],
    compile: bool,
    virtual_ranks: int | None = None,
) -> nn.Module:
    """Checkpointing, then compilation, then FSDP2 on every block and on what is left.

    Gradients are *summed* over ranks, never averaged: the step has divided by the weight of the
    global batch already. With virtual ranks they are summed in the order of these.
    """
    for block in blocks:
        if activation_checkpointing == "full":
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        if compile:
            block.compile(dynamic=True)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if precision == "bf16" else None, reduce_dtype=torch.float32
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if virtual_ranks and mesh.size() > 1:
                rounds = num_rounds(virtual_ranks, mesh.size())
                module.set_custom_reduce_scatter(OrderedReduceScatter(rounds))
    return model


def synchronize_gradients(model: nn.Module, wanted: bool) -> None:
    """Whether the next backward pass reduces gradients over ranks or adds them up locally."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
