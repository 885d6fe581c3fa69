"""Slow tests in parts, of which one runs at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def part_of_the_slow(items: Sequence[pytest.Item], number: int, parts: int) -> list[pytest.Item]:
    """All that are not slow, and every `parts`-th of those that are: together, the parts from 0 to
    `parts - 1` have each slow test once. Neighbours, such as two values of a parameter, are in
    different parts, whatever the order of the items.

    Args:
        items: the tests, as collected.
        number: of the part, modulo `parts`.
        parts: how many there are.
    """
    slow = sorted(item.nodeid for item in items if item.get_closest_marker("slow"))
    others = {nodeid for place, nodeid in enumerate(slow) if (place - number) % parts}
    return [item for item in items if item.nodeid not in others]
