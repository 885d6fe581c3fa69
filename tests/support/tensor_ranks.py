"""Trains models divided over ranks, for the tests of tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elastrata.training.record import StepRecord
from support.bare_loop import train_on_ranks


def train_all(
    rank: int, world_size: int, recipes: Sequence[dict[str, Any]]
) -> list[list[StepRecord]]:
    """The records of each of some recipes, one run after the other."""
    return [train_on_ranks(rank, world_size, recipe) for recipe in recipes]
