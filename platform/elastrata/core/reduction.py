"""The sum of gradients over ranks: in which numbers it travels, when it is waited for, and in which
order it is added up.

FSDP2's own sums travel in fp32, and on a CPU the backward pass waits for each of them. Whatever
travels, gradients are kept and added up over micro-batches in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from elastrata.core import exchange
from elastrata.core.exchange import Exchange
from elastrata.core.fsdp_internals import (
    DefaultAllGather,
    DefaultReduceScatter,
    ReduceScatter,
)

Then = Callable[[dist.Work, Callable[[], object]], None]
"""Sees to it that something is done once a collective has ended."""


def at_once(work: dist.Work, then: Callable[[], object]) -> None:
    """Waits here; on a GPU only its stream does."""
    work.wait()
    then()


class DuringBackward:
    """Waits where the backward pass ends, which goes on meanwhile.

    For one reduction per step: FSDP2 would add the sums, which are not there yet, to those of an
    earlier one.
    """

    def __init__(self) -> None:
        self._started: list[tuple[dist.Work, Callable[[], object]]] = []

    def __call__(self, work: dist.Work, then: Callable[[], object]) -> None:
        """Does it where the backward pass ends."""
        if not self._started:
            Variable._execution_engine.queue_callback(self._finish)
        self._started.append((work, then))

    def _finish(self) -> None:
        started, self._started = self._started, []
        for work, then in started:
            at_once(work, then)


class Reduction(DefaultReduceScatter):
    """Sums buckets of gradients over ranks; for all buckets of a model.

    Args:
        dtype: in which gradients travel. Over the ranks that share a copy of the model each part
            is rounded to it once, and the parts are added in fp32, in the order of the ranks. Over
            the copies every sum of two is rounded.
        then: `at_once`, or a `DuringBackward`: buckets then hold their sums no sooner than the
            backward pass has ended.
        copies: the ranks that have the same shard of other copies of the model, and this one.
        exchange: between the ranks that share a copy; None: at once.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        then: Then,
        copies: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._dtype = dtype
        self._then = then
        self._copies = copies
        self._exchange = exchange

    def attach(self, module: FSDPModule) -> None:
        """Sums this bucket's gradient; FSDP2 must know only the ranks that share a copy."""
        module.set_custom_reduce_scatter(self)
        if self._copies:
            module.set_all_reduce_hook(self._over_copies)

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Over the ranks that share a copy of the model. Collective.

        Args:
            output_tensor: shape [shard], fp32; this rank's shard of the sum.
            input_tensor: shape [num_ranks * shard], fp32; this rank's gradient, shard after shard.
            group: the ranks.
            op: must be a sum; FSDP is told so elsewhere.
            async_op: must be false.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op
        then = at_once if self._copies else self._then  # the sum over copies is of this one
        if self._dtype == input_tensor.dtype:
            work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
            then(work, lambda: input_tensor)  # kept until then
            return None
        sent = input_tensor.to(self._dtype)
        received = torch.empty_like(sent)
        work = (self._exchange or exchange.at_once(group))(received, sent)
        parts = received.view(group.size(), -1)
        then(work, lambda: torch.sum(parts, 0, dtype=output_tensor.dtype, out=output_tensor))
        return None

    def _over_copies(self, gradient: Tensor) -> None:
        """Over `copies`, in place. Collective.

        Args:
            gradient: shape [shard], fp32; summed over the ranks of this copy.
        """
        sent = gradient.to(self._dtype)
        work = dist.all_reduce(sent, group=self._copies, async_op=True)
        self._then(work, lambda: gradient.copy_(sent))


class DeterministicReduceScatter(ReduceScatter):
    """Adds up the gradients of virtual ranks 0, 1, 2, ... from left to right, over all rounds of a
    step; one for each of FSDP's buckets.

    In every round each rank brings the gradient of the virtual rank that it plays, in the order of
    the ranks, or zeros. Every rank gets its shard of all of them and adds them to what it has, in
    order: the very additions, in the very order, of a single rank that plays all virtual ranks one
    after the other. FSDP adds up what it is given in the rounds of a step, so it is given zeros in
    all but the last.

    The ranks exchange as much as in a ring's reduce-scatter; it takes memory for two more shards.

    Args:
        exchange: between the ranks; None: at once.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._rounds = 1
        self._exchange = exchange
        self._round = 0
        self._sum: Tensor | None = None

    def begin(self, rounds: int) -> None:
        """The next step has so many rounds."""
        assert self._round == 0, "the step before it has rounds left"
        self._rounds = rounds

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
        (self._exchange or exchange.at_once(group))(received, input_tensor).wait()
        for shard in received.chunk(group.size()):
            self._sum = shard.clone() if self._sum is None else self._sum.add_(shard)
        self._round = (self._round + 1) % self._rounds
        if self._round or self._sum is None:
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._sum)
            self._sum = None
        return None


class BackgroundAllGather(DefaultAllGather):
    """Gathers parameters while the computation goes on; FSDP2 waits where it needs them."""

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Collective."""
        return super().__call__(output_tensor, input_tensor, group, async_op=True)
