"""A reduction of gradients whose order does not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from elastrata.core.fsdp_internals import ReduceScatter


class DeterministicReduceScatter(ReduceScatter):
    """Adds up the gradients of virtual ranks 0, 1, 2, ... from left to right, over all rounds of a
    step; one for each of FSDP's buckets.

    In round k rank r brings the gradient of virtual rank k * num_ranks + r. Every rank gets its
    shard of all of them and adds them to what it has, in order: the very additions, in the very
    order, of a single rank that plays all virtual ranks one after the other. FSDP adds up what it
    is given in the rounds of a step, so it is given zeros in all but the last.

    The ranks exchange as much as in a ring's reduce-scatter; it takes memory for two more shards.

    Args:
        rounds: of a step.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._round = 0
        self._sum: Tensor | None = None

    @override
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collective.

        Args:
            output_tensor: shape [shard]; this rank's shard of the sum, or zeros.
            input_tensor: shape [num_ranks * shard]; this rank's gradient, shard after shard.
            group: the ranks.
            op: must be a sum; FSDP is told so elsewhere.
            async_op: must be false.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for shard in received.chunk(group.size()):
            self._sum = shard.clone() if self._sum is None else self._sum.add_(shard)
        self._round = (self._round + 1) % self._rounds
        if self._round or self._sum is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._sum)
            self._sum = None
        return None
