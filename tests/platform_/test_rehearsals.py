"""Layouts of all models, rehearsed: memory as planned, waits where they may be, known messages."""

from __future__ import annotations

from functools import cache

import pytest
from _pytest.mark import ParameterSet

from support.allowed_waits import unexpected_waits
from support.rehearsed_layouts import (
    MODELS,
    golden,
    is_kept,
    layouts,
    ledger,
    rehearse_layout,
    worlds,
)

QUICK = {("gpt", "fsdp", 8), ("modernbert", "sequence", 8)}
ERROR = 0.02
"""Of the plan's memory, at most."""


def _case(model: str, layout: str, world_size: int) -> ParameterSet:
    case = model, layout, world_size
    return pytest.param(*case, marks=() if case in QUICK else pytest.mark.matrix)


EVERY = [
    _case(model, layout, size)
    for model in MODELS
    for layout in layouts(model)
    for size in worlds(model, layout)
]
KEPT = [
    _case(model, layout, size)
    for model in MODELS
    for layout in layouts(model)
    if is_kept(model, layout)
    for size in worlds(model, layout)
]
_rehearsed = cache(rehearse_layout)


@pytest.mark.parametrize(("model", "layout", "world_size"), EVERY)
def test_memory_is_as_planned_and_the_host_waits_where_it_may(
    model: str, layout: str, world_size: int
) -> None:
    figures = _rehearsed(model, layout, world_size)
    fullest = max(figures, key=lambda rank: rank.peak_bytes)
    assert fullest.planned_bytes == pytest.approx(fullest.peak_bytes, rel=ERROR)
    for rank in figures:
        assert unexpected_waits(rank.waits) == []


@pytest.mark.parametrize(("model", "layout", "world_size"), KEPT)
def test_messages_are_those_of_the_ledger(model: str, layout: str, world_size: int) -> None:
    found = ledger(_rehearsed(model, layout, world_size))
    assert found == golden(model, layout, world_size), (
        f"write it anew with PYTHONPATH=tests python -m support.rehearsed_layouts {model} {layout}"
    )
