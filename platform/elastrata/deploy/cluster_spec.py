"""The outline of a cluster: kinds of nodes, and how many of each there can ever be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

_ROUNDING = 1e-6
"""Three workers of 0.4 CPUs need no more than 1.2."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind."""

    name: str
    resources: Mapping[str, float]
    """Amounts on one node, by Ray's names: `CPU`, `GPU`."""
    min_nodes: int
    max_nodes: int

    def room(self, worker: Mapping[str, float]) -> int:
        """Workers of these resources that fit on one node.

        Args:
            worker: what one worker claims; at least one amount is above 0.
        """
        return min(
            int((self.resources.get(name, 0.0) + _ROUNDING) // amount)
            for name, amount in worker.items()
            if amount > 0
        )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes that a cluster file can ever provide."""

    file: str
    """As the user named it."""
    head: NodeGroup
    groups: tuple[NodeGroup, ...]
    """Nodes beside the head."""
    max_nodes: int
    """Most nodes of these groups together."""

    def room(self, worker: Mapping[str, float]) -> int:
        """The most workers of these resources that there can ever be at once."""
        return int(self._most(lambda group: group.room(worker)))

    def amount(self, resource: str) -> float:
        """The most of a resource that there can ever be at once."""
        return self._most(lambda group: group.resources.get(resource, 0.0))

    def _most(self, on_a_node: Callable[[NodeGroup], float]) -> float:
        """The sum over the head, the nodes that always run, and the best choice of others."""
        total = on_a_node(self.head)
        total += sum(group.min_nodes * on_a_node(group) for group in self.groups)
        free = self.max_nodes - sum(group.min_nodes for group in self.groups)
        for group in sorted(self.groups, key=on_a_node, reverse=True):
            count = max(0, min(group.max_nodes - group.min_nodes, free))
            total += count * on_a_node(group)
            free -= count
        return total
