"""Rivals: keys of a section of which only one can hold; a later one replaces the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RIVALS: Mapping[str, frozenset[str]] = {
    "steps": frozenset({"epochs", "tokens"}),
    "epochs": frozenset({"steps", "tokens"}),
    "tokens": frozenset({"steps", "epochs"}),
    "warmup_steps": frozenset({"warmup_ratio"}),
    "warmup_ratio": frozenset({"warmup_steps", "warmup_offset"}),
}
"""By key those of the same section that it stands in the place of."""


def without_rivals(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A section of a base less what the values replace by keys of other names.

    Args:
        base: the section as the base has it; stays as it is.
        values: what is to be merged into it. A key that it sets to null replaces nothing.
    """
    replaced = {
        rival for key, value in values.items() if value is not None for rival in rivals_of(key)
    }
    return {key: value for key, value in base.items() if key not in replaced or key in values}


def rivals_of(key: str) -> frozenset[str]:
    """The keys of the same section that this one stands in the place of."""
    return RIVALS.get(key, frozenset())
