"""FSDP2's internals: the collectives that this project replaces, without PyTorch's promise.

Nothing else imports `torch.distributed.fsdp._fully_shard`; look here at a new version of PyTorch.
"""

from __future__ import annotations

from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

__all__ = ["DefaultAllGather", "DefaultReduceScatter", "ReduceScatter"]
