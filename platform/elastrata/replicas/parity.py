"""Parity in the place of second copies: the XOR of the parts of several nodes, on others.

As RAID 5 has it (Patterson, Gibson and Katz 1988), over nodes instead of disks: what one lost node
held is the XOR of the parity and of what the others of its group hold. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_PART = ".distcp"
"""Ends the names of the files that have tensors. The others are small, and copied."""


@dataclass(frozen=True)
class ParityPlan:
    """Who is in a group with whom, and where its parity lies: a pure function of these.

    The nodes that write, in order, are cut into groups of `size`, the last one of fewer. Chunk
    after chunk of a group's parity lies on another of the nodes that are not in it: so all hold
    about the same.
    """

    nodes: tuple[str, ...]
    """The node of every rank."""
    size: int
    """Nodes in a group at most."""

    @property
    def is_needed(self) -> bool:
        """Whether a group has several nodes: the XOR of a single one is a copy."""
        return self._members > 1

    @cached_property
    def ring(self) -> tuple[str, ...]:
        """The nodes that write."""
        return tuple(sorted(set(self.nodes)))

    @property
    def _members(self) -> int:
        """Nodes in a full group: at least one more is outside."""
        return min(self.size, len(self.ring) - 1)

    def group(self, node: str) -> int:
        """The number of a node's group."""
        return self.ring.index(node) // self._members

    def outside(self, node: str) -> tuple[str, ...]:
        """The nodes that are not in its group; the first one takes the first chunk."""
        number, members = self.group(node), self._members
        return self.ring[(number + 1) * members :] + self.ring[: number * members]

    def host(self, node: str, chunk: int) -> str:
        """Where the parity of a chunk of its files lies."""
        others = self.outside(node)
        return others[chunk % len(others)]

    def name(self, rank: int, path: str) -> str | None:
        """The parity of a rank's file, the same for one file of each node of the group; None where
        the file is copied."""
        folder, _, file = path.rpartition("/")
        if not file.endswith(_PART):
            return None
        node = self.nodes[rank]
        before = self.nodes[:rank].count(node)
        tail = file.removesuffix(_PART).rpartition("_")[2]
        return f"{folder}/{self.group(node)}-{before}-{tail}.parity"

    def most_per_node(self, sizes: Sequence[int], chunk_bytes: int) -> int:
        """The most bytes that any node holds of one state.

        Args:
            sizes: of every rank's part.
            chunk_bytes: of a chunk.
        """
        held = dict.fromkeys(self.ring, 0)
        largest: dict[str, tuple[int, str]] = {}
        for rank, (node, size) in enumerate(zip(self.nodes, sizes, strict=True)):
            held[node] += size
            name = self.name(rank, f"/__{rank}_0{_PART}") or ""
            largest[name] = max(largest.get(name, (0, node)), (size, node))
        for size, node in largest.values():
            for chunk, start in enumerate(range(0, size, chunk_bytes)):
                held[self.host(node, chunk)] += min(chunk_bytes, size - start)
        return max(held.values())


@dataclass(frozen=True)
class Parity:
    """What one node holds of a parity."""

    files: Mapping[str, int]
    """Bytes of every file that is in it, by path."""
    chunks: tuple[int, ...]
    """Numbers of those chunks whose files have all arrived whole."""


@dataclass(frozen=True)
class Rebuildable:
    """A file that no node holds, but that follows from others."""

    size: int
    """Bytes."""
    parity: str
    """The parity's name."""
    hosts: Mapping[int, str]
    """The node of every chunk of the parity."""
    others: Mapping[str, int]
    """Bytes of the other files that are in it, by path; nodes hold all of them."""


def rebuildable(
    held: Iterable[str], parities: Mapping[str, Mapping[str, Parity]], chunk_bytes: int
) -> dict[str, Rebuildable]:
    """The files that can be had from parity alone, by path.

    Args:
        held: paths of the files that nodes hold.
        parities: what every node holds of each, by node and name.
        chunk_bytes: of a chunk.
    """
    there = set(held)
    files: dict[str, dict[str, int]] = {}
    hosts: dict[str, dict[int, str]] = {}
    for node, by_name in parities.items():
        for name, parity in by_name.items():
            files.setdefault(name, {}).update(parity.files)
            hosts.setdefault(name, {}).update(dict.fromkeys(parity.chunks, node))
    found = {}
    for name, sizes in files.items():
        lost = sizes.keys() - there
        if len(lost) != 1:
            continue
        (path,) = lost
        needed = range(-(-sizes[path] // chunk_bytes))
        if all(chunk in hosts[name] for chunk in needed):
            others = {other: size for other, size in sizes.items() if other != path}
            found[path] = Rebuildable(sizes[path], name, hosts[name], others)
    return found
