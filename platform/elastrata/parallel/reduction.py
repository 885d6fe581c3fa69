"""The sum of gradients over ranks: its precision, its overlap with the backward pass, and its
order.

FSDP2's own sums travel in fp32, and on a CPU the backward pass waits for each of them. Gradients
are always kept and accumulated over micro-batches in fp32.

In a direct exchange every rank has a connection to every other rank: at a thousand ranks too many
for NCCL's memory and for a network. In two hops, a rank has one to each rank of its node, and to
one rank of each other node. Traffic between nodes is the same, and traffic inside of nodes doubles.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from elastrata.parallel.fsdp_internals import DefaultAllGather, DefaultReduceScatter, ReduceScatter

Exchange = Callable[[Tensor, Tensor], dist.Work]
"""Collective that puts part r of the second tensor, shape [num_ranks * part], into the first
tensor of rank r, as the part from this rank."""


def direct_exchange(group: dist.ProcessGroup) -> Exchange:
    """Return the direct exchange: every rank sends to every other rank."""

    def exchange(received: Tensor, sent: Tensor) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return work

    return exchange


class TwoHops:
    """Exchange in two hops, with the result of `direct_exchange` to the bit.

    A part first goes to the rank of this node that has the receiver's local rank, and from there to
    the receiver's node.

    Args:
        neighbours: ranks of the group on this node, in order.
        counterparts: ranks with the same local rank on every node, in order.
    """

    def __init__(self, neighbours: dist.ProcessGroup, counterparts: dist.ProcessGroup) -> None:
        self._neighbours, self._counterparts = neighbours, counterparts

    def __call__(self, received: Tensor, sent: Tensor) -> dist.Work:
        """See `Exchange`."""
        nodes, places = self._counterparts.size(), self._neighbours.size()
        # First hop: local rank p of this node gets the parts for local rank p of every node.
        by_place = sent.view(nodes, places, -1).transpose(0, 1).contiguous()
        through = torch.empty_like(by_place)
        dist.all_to_all_single(through, by_place, group=self._neighbours)
        # Second hop: every node's rank p gets the parts of all ranks of this node.
        by_node = through.transpose(0, 1).contiguous()
        received = received.view_as(by_node)
        work: dist.Work = dist.all_to_all_single(
            received, by_node, group=self._counterparts, async_op=True
        )
        return work


def build_exchange(group: dist.ProcessGroup, nodes: Sequence[object], backend: str) -> Exchange:
    """Build the exchange over a group. Collective over the group.

    It takes two hops if the group spans several nodes with the same number of ranks, more than one,
    on each; otherwise it is direct.

    Args:
        group: the ranks.
        nodes: node of every rank of the default group.
        backend: backend of the new groups.
    """
    ranks = dist.get_process_group_ranks(group)
    sizes = node_sizes([nodes[rank] for rank in ranks])
    # A second hop saves connections only between equal nodes with several ranks each.
    if len(sizes) < 2 or len(set(sizes)) > 1 or sizes[0] == 1:
        return direct_exchange(group)
    node, place = divmod(ranks.index(dist.get_rank()), sizes[0])
    neighbours = ranks[node * sizes[0] : (node + 1) * sizes[0]]
    counterparts = ranks[place :: sizes[0]]
    return TwoHops(_new_subgroup(neighbours, backend), _new_subgroup(counterparts, backend))


def node_sizes(nodes: Sequence[object]) -> list[int]:
    """Return the lengths of the runs of ranks on the same node, in order."""
    return [len(list(run)) for _, run in groupby(nodes)]


def nodes_of_all() -> list[object]:
    """Return the node of every rank of the default group. Collective."""
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names


def _new_subgroup(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """Create a process group. Collective over its members only."""
    # Other ranks need not create a group in the same place, hence the local synchronisation.
    group: dist.ProcessGroup = dist.new_group(
        ranks, backend=backend, use_local_synchronization=True
    )
    return group


OnCompletion = Callable[[dist.Work, Callable[[], object]], None]
"""Runs a function once a collective has finished."""


def wait_and_run(work: dist.Work, then: Callable[[], object]) -> None:
    """Wait for the collective, then run the function. On a GPU only the stream waits."""
    work.wait()
    then()


class DuringBackward:
    """Delays the wait for collectives to the end of the backward pass."""

    # Only for one reduction per step: with several, FSDP2 would accumulate a sum that is not there
    # yet.
    def __init__(self) -> None:
        self._pending: list[tuple[dist.Work, Callable[[], object]]] = []

    def __call__(self, work: dist.Work, then: Callable[[], object]) -> None:
        """Schedule the function for the end of the backward pass."""
        if not self._pending:
            Variable._execution_engine.queue_callback(self._finish)
        self._pending.append((work, then))

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for work, then in pending:
            wait_and_run(work, then)


class Reduction(DefaultReduceScatter):
    """Sums the gradient buckets of a model over ranks.

    Args:
        dtype: type in which gradients travel. Over the ranks that share a copy of the model, each
            part is rounded to it once, and the parts are added in fp32 in the order of the ranks.
            Over the copies, every sum of two is rounded.
        then: `wait_and_run`, or a `DuringBackward`, with which buckets have their sums only after
            the backward pass.
        copies: ranks with the same shard in all copies of the model, this one included.
        exchange: among the ranks that share a copy; None: direct.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        then: OnCompletion,
        copies: dist.ProcessGroup | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._dtype = dtype
        self._then = then
        self._copies = copies
        self._exchange = exchange
        self.sums_over_copies = True
        """False before the last backward pass of a step: sums over `copies` wait for that."""

    def attach(self, module: FSDPModule) -> None:
        """Reduce this bucket's gradient. FSDP2 must only know the ranks that share a copy."""
        module.set_custom_reduce_scatter(self)
        if self._copies:
            module.set_all_reduce_hook(_SumOverCopies(self, self._copies))

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Sum over the ranks that share a copy of the model. Collective.

        Args:
            output_tensor: shape [shard], fp32; this rank's shard of the sum.
            input_tensor: shape [num_ranks * shard], fp32; this rank's gradient, shard after shard.
            group: the ranks.
            op: must be a sum, which `set_force_sum_reduction_for_comms` ensures.
            async_op: must be false.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op
        # The sum over copies needs this one as its input.
        then = wait_and_run if self._copies else self._then
        if self._dtype == input_tensor.dtype:
            work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
            then(work, lambda: input_tensor)  # keeps the tensor alive until then
            return None
        # An exchange instead of a reduce-scatter, which would round every partial sum.
        sent = input_tensor.to(self._dtype)
        received = torch.empty_like(sent)
        work = (self._exchange or direct_exchange(group))(received, sent)
        parts = received.view(group.size(), -1)
        then(work, lambda: torch.sum(parts, 0, dtype=output_tensor.dtype, out=output_tensor))
        return None

    def all_reduce(self, gradient: Tensor, copies: dist.ProcessGroup) -> None:
        """Sum over the copies in place, in the type in which gradients travel. Collective."""
        sent = gradient.to(self._dtype)
        work = dist.all_reduce(sent, group=copies, async_op=True)
        self._then(work, lambda: gradient.copy_(sent))


class _SumOverCopies:
    """FSDP2's hook of one bucket after its sum over the ranks that share a copy.

    FSDP2 calls it in every backward pass that reduces, whether `set_requires_all_reduce` is set or
    not. So it keeps the sums of the earlier passes itself, as FSDP2 does without a hook.
    """

    def __init__(self, reduction: Reduction, copies: dist.ProcessGroup) -> None:
        self._reduction, self._copies = reduction, copies
        self._partial: Tensor | None = None

    def __call__(self, gradient: Tensor) -> None:
        if gradient.is_cuda:
            # FSDP2 allocates it on another stream, and drops it when it has been added.
            gradient.record_stream(torch.cuda.current_stream())
        if not self._reduction.sums_over_copies:
            self._partial = (
                gradient.clone() if self._partial is None else self._partial.add_(gradient)
            )
            gradient.zero_()  # FSDP2 adds it to the shard's gradient
            return
        if self._partial is not None:
            gradient.add_(self._partial)
            self._partial = None
        self._reduction.all_reduce(gradient, self._copies)


class DeterministicReduceScatter(ReduceScatter):
    """Adds up the gradients of virtual ranks 0, 1, 2, ... from left to right; one for each FSDP
    bucket.

    In every round of a step, each rank contributes the gradient of the virtual rank that it plays,
    in the order of the ranks, or zeros. Every rank receives its shard of all of them and adds them
    to its sum in order. These are the additions, in the same order, of a single rank that plays all
    virtual ranks one after the other.

    The traffic is that of a ring reduce-scatter. It needs memory for two more shards.
    """

    def __init__(self, exchange: Exchange | None = None) -> None:
        self._rounds = 1
        self._exchange = exchange
        self._round = 0
        self._sum: Tensor | None = None

    def begin(self, rounds: int) -> None:
        """Set the number of rounds of the next step."""
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
        """Add the shards of this round. Collective."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        received = torch.empty_like(input_tensor)
        (self._exchange or direct_exchange(group))(received, input_tensor).wait()
        for shard in received.chunk(group.size()):
            # From left to right, in the order of virtual ranks: fp32 addition is not associative.
            self._sum = shard.clone() if self._sum is None else self._sum.add_(shard)
        self._round = (self._round + 1) % self._rounds
        if self._round or self._sum is None:
            # FSDP2 accumulates the outputs of all rounds, so only the last one may return the sum.
            output_tensor.zero_()
        else:
            output_tensor.copy_(self._sum)
            self._sum = None
        return None


class BackgroundAllGather(DefaultAllGather):
    """Gathers parameters in the background; FSDP2 waits when it needs them."""

    @override
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Start the gathering. Collective."""
        return super().__call__(output_tensor, input_tensor, group, async_op=True)
