"""Internals of FSDP2 that this project uses, without PyTorch's stability guarantee.

No other module imports `torch.distributed.fsdp._fully_shard`. Check this one with every new version
of PyTorch.
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
    """Yield the padded size of this rank's shard, and the shard, of every tensor of a bucket.

    The order is that of FSDP2's reduction.
    """
    # A module whose parameters are all in nested FSDP modules has no group.
    group: Any = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group else ():
        yield parameter.padded_sharded_param_size.numel(), parameter.sharded_param
