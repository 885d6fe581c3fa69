"""The room that copies in memory need: known before the first of them is made."""

from __future__ import annotations

from collections.abc import Sequence

_STATES = 2
"""The newest copy stays until the next one is complete."""


def most_per_node(parts: Sequence[tuple[str, int]]) -> int:
    """The most bytes that any store is to hold.

    Args:
        parts: of every writer its node and the bytes of its part. Every node that writes takes the
            parts of its own writers, and of those of the node before it in the ring; where one
            writes alone, another node may take them.
    """
    own: dict[str, int] = {}
    for node, size in parts:
        own[node] = own.get(node, 0) + size
    ring = sorted(own)
    if len(ring) == 1:
        return _STATES * own[ring[0]]
    return _STATES * max(own[node] + own[ring[place - 1]] for place, node in enumerate(ring))
