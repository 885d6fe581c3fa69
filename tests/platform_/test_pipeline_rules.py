"""What of a pipeline cannot be is refused in a line."""

from __future__ import annotations

from typing import Any

import pytest

from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import cross_field_problems
from support.synthetic import tiny_recipe

GPT = {"name": "gpt", "hidden_size": 32, "num_layers": 4, "num_heads": 4}
FOUR = {"min": 4, "max": 4}


def _problems(**changes: Any) -> list[Any]:
    whole = {"workload": GPT, "workers": FOUR, "parallel": {"pipeline": 2}, **changes}
    return cross_field_problems(Recipe.model_validate(tiny_recipe("data", "runs", **whole)))


@pytest.mark.parametrize(
    ("changes", "key", "line"),
    [
        (
            {"parallel": {"virtual_stages": 2}},
            ("parallel", "virtual_stages"),
            "parallel.virtual_stages: 2: requires parallel.pipeline of 2 or more",
        ),
        (
            {"parallel": {"pipeline": 8}, "workers": {"min": 8, "max": 8}},
            ("parallel", "pipeline"),
            "parallel.pipeline: 8 stages in all: expected at most workload.num_layers (4), one "
            "block for each",
        ),
        (
            {"batch_size": 3},
            ("batch_size",),
            "batch_size: 3: expected at least 4: a sample for each of 2 micro-batches of "
            "workers.max / parallel.pipeline (2) groups of workers",
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": 2}, "workers": {"min": 2, "max": 8}},
            ("workers", "min"),
            "workers.min: 2: expected a multiple of parallel.tensor x parallel.pipeline (4), such "
            "as 4",
        ),
    ],
)
def test_what_cannot_be_cut(changes: dict[str, Any], key: tuple[str, ...], line: str) -> None:
    assert _problems(**changes) == [(key, line)]
