"""FSDP2's internals: what this project uses of them, without PyTorch's promise.

Nothing else imports `torch.distributed.fsdp._fully_shard`; look here at a new version of PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "DefaultAllGather",
    "DefaultReduceScatter",
    "ReduceScatter",
    "StridedShard",
    "bucket_parameters",
]


def bucket_parameters(module: FSDPModule) -> Iterator[tuple[int, Tensor]]:
    """For every tensor of a bucket, in the order in which FSDP2 reduces them: the numbers in this
    rank's shard, padding included, and the shard."""
    group: Any = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        yield parameter.padded_sharded_param_size.numel(), parameter.sharded_param
