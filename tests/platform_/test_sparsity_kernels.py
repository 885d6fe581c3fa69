"""Linear layers by the 2:4 kernels: all but the kernels themselves, which no CPU has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from elastrata.device.kernels import SemiStructured, has_kernels
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.errors import UserError
from support.ranks import run_ranks
from support.sparse_ranks import train_all_with_kernels
from support.synthetic import tiny_recipe, write_data_set

SIZES = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_positions": 48, "dropout": 0.0}
FOURS = {"method": "two_four", "layers": ["*.query", "*.down"]}


def _itself(weight: Tensor) -> Tensor:
    return weight


@pytest.mark.parametrize("shape", [(7, 8), (2, 3, 8)])
def test_gradients_are_those_of_a_linear_layer(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    sizes = (shape, (5, 8), (5,))
    tensors = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in sizes]
    product = partial(SemiStructured.apply)
    found, right = product(*tensors, _itself), F.linear(*tensors)
    assert torch.equal(found, right)
    weights = torch.randn_like(right)
    both = (torch.autograd.grad((out * weights).sum(), tensors) for out in (found, right))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_only_what_is_in_fours_is_compressed_and_only_as_long_as_it_is(tmp_path: Path) -> None:
    """Two ranks, two phases: the same losses as without, to the bit."""
    write_data_set(tmp_path / "data", samples=80)
    phases = [{"steps": 3, "sparsity": {**FOURS, "kernels": True}}, {"steps": 2, "sparsity": None}]
    values: dict[str, Any] = {
        "workload": {"name": "gpt", **SIZES},
        "precision": "bf16",
        "batch_size": 9,
        "micro_batch_tokens": 4096,
        "phases": phases,
        "steps": 5,
    }
    recipe = tiny_recipe(tmp_path / "data", tmp_path / "runs", **values)
    for (with_kernels, seen), (without, none) in run_ranks(2, train_all_with_kernels, recipe):
        assert with_kernels == without
        assert none == []
        assert seen == [(64, 64), (64, 256)] * 2 * 3  # in two blocks, in three steps


def test_a_cpu_has_none() -> None:
    assert not has_kernels(torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["precision=fp32"], "expected precision bf16, not fp32: the kernels support no other"),
        (
            ["precision=bf16", "parallel.tensor=2"],
            "expected parallel.tensor 1, not 2: divided layers have no kernels",
        ),
        (
            ["precision=bf16", "workload.hidden_size=96", "workload.num_heads=2"],
            "expected layers of multiples of 64 rows and columns, not 96 by 96 as "
            "blocks.0.attention.query; leave it out of sparsity.layers",
        ),
    ],
)
def test_what_they_cannot_do_is_told_before_anything_starts(
    overrides: list[str], line: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe("gpt/tiny", ["sparsity={method: two_four, kernels: true}", *overrides])
    assert f"command line: sparsity.kernels: true: {line}" in caught.value.problems
