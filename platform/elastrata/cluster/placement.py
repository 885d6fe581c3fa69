"""Which node each worker is placed on, so that the workers of a tensor group share one. Numbers in,
nodes out.

Ray Train numbers workers node by node, in the order in which it was asked for their places. So the
order of nodes is the order of ranks: neighbours in it have one stage of a pipeline, or the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def place(rooms: Mapping[str, int], workers: int, tensor: int) -> list[str] | None:
    """The node of each worker, in the order of ranks; None where there is no room for all.

    Whole tensor groups come first, node by node. Where these are not all there is room for what is
    left over of each node, which comes last: few groups lie on several nodes then.

    Args:
        rooms: workers that fit on each node; those in front are taken first.
        workers: that are wanted, a multiple of `tensor`.
        tensor: workers of a tensor group.
    """
    whole = {node: room - room % tensor for node, room in rooms.items()}
    if sum(rooms.values()) < workers:
        return None
    taken = _taken(whole, workers)
    left = workers - sum(taken.values())
    rest = _taken({node: rooms[node] - whole[node] for node in rooms}, left)
    counts = {node: taken[node] + rest[node] for node in rooms}
    even = [node for node in rooms if not rest[node]]
    order = [*even, *(node for node in rooms if rest[node])]
    return [node for node in order for _ in range(counts[node])]


def in_whole_groups(rooms: Sequence[int], tensor: int) -> int:
    """Workers that there is room for in tensor groups that lie on one node each."""
    return sum(room - room % tensor for room in rooms)


def split_groups(nodes: Sequence[str], tensor: int) -> int:
    """Tensor groups whose workers are on several nodes.

    Args:
        nodes: of each rank.
        tensor: workers of a tensor group, which are neighbours.
    """
    groups = (nodes[first : first + tensor] for first in range(0, len(nodes), tensor))
    return sum(len(set(group)) > 1 for group in groups)


def in_order(
    rooms: Mapping[str, int], peaks: Mapping[str, float], *, fastest_first: bool
) -> dict[str, int]:
    """Nodes with equally fast devices one after the other, the largest rooms of each first.

    Args:
        rooms: workers that fit on each node.
        peaks: of the devices of each node; those of others are taken for equal.
        fastest_first: else they come last.
    """
    sign = -1 if fastest_first else 1
    order = sorted(rooms, key=lambda node: (sign * peaks.get(node, 0.0), -rooms[node], node))
    return {node: rooms[node] for node in order}


def split_line(nodes: Sequence[str], tensor: int) -> str:
    """What to tell of tensor groups that lie on several nodes; empty where none does."""
    split = split_groups(nodes, tensor)
    if not split:
        return ""
    return (
        f"parallel.tensor: {tensor}: {split} of {len(nodes) // tensor} groups have workers on "
        "several nodes, and talk over the network in every block; a node with room for a multiple "
        f"of {tensor} workers has whole groups"
    )


def _taken(rooms: Mapping[str, int], workers: int) -> dict[str, int]:
    """Workers on each node, where those in front are filled first."""
    taken = {}
    for node, room in rooms.items():
        taken[node] = min(room, workers)
        workers -= taken[node]
    return taken
