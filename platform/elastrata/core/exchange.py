"""The exchange of equal parts between all ranks of a group: at once, or in two hops.

At once, every rank has a connection to every other one: at a thousand ranks too many for NCCL's
memory and for a network. In two hops it has one to each of its node, and to one rank of each other
node; what travels between nodes is as much, what travels inside of them twice as much.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

Exchange = Callable[[Tensor, Tensor], dist.Work]
"""Puts part r of the second tensor, shape [num_ranks * part], into rank r's first one, as the part
of this rank. Collective."""


def at_once(group: dist.ProcessGroup) -> Exchange:
    """Every rank to every other one."""

    def exchange(received: Tensor, sent: Tensor) -> dist.Work:
        work: dist.Work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        return work

    return exchange


class TwoHops:
    """To the rank of this node that has the receiver's place in its own, and from there to the
    receiver's node. The result is that of `at_once`, to the bit.

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
        return at_once(group)
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
