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
            "parallel.virtual_stages: 2: expected parallel.pipeline of 2 or more, whose stages it "
            "is about",
        ),
        (
            {"parallel": {"micro_batches": 4}},
            ("parallel", "micro_batches"),
            "parallel.micro_batches: 4: expected parallel.pipeline of 2 or more, whose stages it "
            "is about",
        ),
        (
            {"parallel": {"pipeline": 8}, "workers": {"min": 8, "max": 8}},
            ("parallel", "pipeline"),
            "parallel.pipeline: 8 stages in all: expected at most workload.num_layers (4), a block "
            "for each",
        ),
        (
            {"workload": {"name": "bert", "hidden_size": 32, "num_layers": 1, "num_heads": 2}},
            ("parallel", "pipeline"),
            "parallel.pipeline: 2 stages in all: expected at most workload.num_layers (1), a block "
            "for each",
        ),
        (
            {"parallel": {"pipeline": 2, "virtual_stages": 2}},
            ("parallel", "virtual_stages"),
            "parallel.virtual_stages: 2: expected 1 with schedule 1f1b; several are for "
            "interleaved_1f1b and zero_bubble",
        ),
        (
            {"parallel": {"pipeline": 2, "schedule": "interleaved_1f1b"}},
            ("parallel", "virtual_stages"),
            "parallel.virtual_stages: 1: expected 2 or more with schedule interleaved_1f1b",
        ),
        (
            {"parallel": {"pipeline": 2, "micro_batches": 5}},
            ("parallel", "micro_batches"),
            "parallel.micro_batches: 5: expected a multiple of parallel.pipeline (2), such as 4 or "
            "6",
        ),
        (
            {"batch_size": 3},
            ("batch_size",),
            "batch_size: 3: expected at least 4: a sample for each of 2 micro-batches of "
            "workers.max / parallel.pipeline (2) groups of workers",
        ),
        (
            {"workers": {"min": 2, "max": 7}},
            ("workers", "max"),
            "workers.max: 7: expected a multiple of parallel.pipeline (2), such as 6 or 8",
        ),
        (
            {"parallel": {"pipeline": 2, "tensor": 2}, "workers": {"min": 2, "max": 8}},
            ("workers", "min"),
            "workers.min: 2: expected a multiple of parallel.tensor x parallel.pipeline (4), such "
            "as 4",
        ),
        (
            {"parallel": {"pipeline": 2, "overlap_on_cpu": True}},
            ("parallel", "overlap_on_cpu"),
            "parallel.overlap_on_cpu: True: expected false where parallel.pipeline is 2, which "
            "sums gradients up after all backward passes",
        ),
        (
            {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}},
            ("parallel", "reshard_after_forward"),
            "parallel.reshard_after_forward: True: expected false with parallel.schedule "
            "zero_bubble, which comes back to a block's parameters for its weights' gradients",
        ),
        (
            {
                "parallel": {
                    "pipeline": 2,
                    "schedule": "zero_bubble",
                    "reshard_after_forward": False,
                },
                "activation_checkpointing": "selective",
            },
            ("activation_checkpointing",),
            "activation_checkpointing: 'selective': expected none or full with parallel.schedule "
            "zero_bubble: what it keeps is there for one backward pass, not for its two parts",
        ),
        (
            {
                "parallel": {
                    "pipeline": 2,
                    "schedule": "zero_bubble",
                    "reshard_after_forward": False,
                },
                "compile": True,
            },
            ("compile",),
            "compile: True: expected false with parallel.schedule zero_bubble: a compiled block's "
            "backward pass cannot be divided; or schedule 1f1b or interleaved_1f1b",
        ),
    ],
)
def test_what_cannot_be_cut(changes: dict[str, Any], key: tuple[str, ...], line: str) -> None:
    assert _problems(**changes) == [(key, line)]
