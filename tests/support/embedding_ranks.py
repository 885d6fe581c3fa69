"""A divided embedding beside a whole one, for the tests of tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from elastrata_workloads.unpadded.tensor_parallel import ShardedEmbedding

ROWS, SIZE, TOKENS = 12, 4, 50


def differences(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """For each type, whether hidden states and this rank's part of the gradient are equal to the
    bit, and how many rows that part has."""
    mesh = init_device_mesh("cpu", (world_size,))
    return {str(dtype): _one(rank, mesh, dtype) for dtype in (torch.float32, torch.bfloat16)}


def _one(rank: int, mesh: Any, dtype: torch.dtype) -> dict[str, Any]:
    drawn = torch.Generator().manual_seed(0)
    whole, divided = (nn.Embedding(ROWS, SIZE, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        for table in (whole, divided):
            table.weight.copy_(torch.randn(ROWS, SIZE, generator=drawn.manual_seed(1)))
    parallelize_module(divided, mesh, ShardedEmbedding(), src_data_rank=None)
    ids = torch.randint(ROWS, (TOKENS,), generator=drawn)
    gradient = torch.randn(TOKENS, SIZE, generator=drawn).to(dtype)
    out = [table(ids) for table in (whole, divided)]
    for hidden in out:
        hidden.backward(gradient)
    part = divided.weight.grad
    assert whole.weight.grad is not None
    assert isinstance(part, DTensor)
    rows = part.to_local()
    own = whole.weight.grad.chunk(mesh.size())[rank]
    return {
        "hidden": torch.equal(*out),
        "gradient": torch.equal(rows, own),
        "rows": len(rows),
    }
