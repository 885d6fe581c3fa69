"""The sum of gradients over ranks: in which numbers it travels, when it is waited for, and in which
order it is added up.

FSDP2's own sums travel in fp32, and on a CPU the backward pass waits for each of them. Whatever
travels, gradients are kept and added up over micro-batches in fp32.

At once, every rank has a connection to every other one: at a thousand ranks too many for NCCL's
memory and for a network. In two hops it has one to each of its node, and to one rank of each other
node; what travels between nodes is as much, what travels inside of them twice as much.
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
"""Puts part r of the second tensor, shape [num_ranks * part], into rank r's first one, as the part
of this rank. Collective."""


def exchange_at_once(group: dist.ProcessGroup) -> Exchange:
    """Every rank to every other one."""

    def exchange(received: Tensor, sent: Tensor) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return work

    return exchange


class TwoHops:
    """To the rank of this node that has the receiver's place in its own, and from there to the
    receiver's node. The result is that of `exchange_at_once`, to the bit.

    Args:
        neighbours: the ranks of the group on this node, in order.
        counterparts: those at the same place of every node, in order.
    """

    def __init__(self, neighbours: dist.ProcessGroup, counterparts: dist.ProcessGroup) -> None:
        self._neighbours, self._counterparts = neighbours, counterparts

    def __call__(self, received: Tensor, sent: Tensor) -> dist.Work:
        """See `Exchange`."""
        nodes, places = self._counterparts.size(), self._neighbours.size()
        by_place = sent.view(nodes, places, -1).transpose(0, 1).contiguous()
        through = torch.empty_like(by_place)
        dist.all_to_all_single(through, by_place, group=self._neighbours)
        by_node = through.transpose(0, 1).contiguous()
        received = received.view_as(by_node)
        work: dist.Work = dist.all_to_all_single(
            received, by_node, group=self._counterparts, async_op=True
        )
        return work


def exchange_over(group: dist.ProcessGroup, nodes: Sequence[object], backend: str) -> Exchange:
    """In two hops, where the group is on several nodes, with several ranks, equally many, on each;
    else at once. Collective over the group.

    Args:
        group: the ranks.
        nodes: the node of every rank of the default group.
        backend: of the groups that are made for it.
    """
    ranks = dist.get_process_group_ranks(group)
    sizes = node_sizes([nodes[rank] for rank in ranks])
    if len(sizes) < 2 or len(set(sizes)) > 1 or sizes[0] == 1:
        return exchange_at_once(group)
    node, place = divmod(ranks.index(dist.get_rank()), sizes[0])
    neighbours = ranks[node * sizes[0] : (node + 1) * sizes[0]]
    counterparts = ranks[place :: sizes[0]]
    return TwoHops(_subgroup(neighbours, backend), _subgroup(counterparts, backend))


def node_sizes(nodes: Sequence[object]) -> list[int]:
    """Ranks on each node, in order; a node that ranks of others lie between counts each time."""
    return [len(list(run)) for _, run in groupby(nodes)]


def nodes_of_all() -> list[object]:
    """The node of every rank of the default group. Collective."""
    names: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return names


def _subgroup(ranks: list[int], backend: str) -> dist.ProcessGroup:
    """Only its members make it: others have none of their own to make at the same place."""
    made: dist.ProcessGroup = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    return made


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
        work = (self._exchange or exchange_at_once(group))(received, sent)
        parts = received.view(group.size(), -1)
        then(work, lambda: torch.sum(parts, 0, dtype=output_tensor.dtype, out=output_tensor))
        return None

    def _over_copies(self, gradient: Tensor) -> None:
        """Over `copies`, in place. Collective."""
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
        """Collective."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        received = torch.empty_like(input_tensor)
        (self._exchange or exchange_at_once(group))(received, input_tensor).wait()
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
