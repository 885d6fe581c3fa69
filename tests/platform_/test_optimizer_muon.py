"""Muon against PyTorch's, its orthogonal updates, and how the matrices are shared out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elastrata.optim.muon import Muon, MuonConfig, assign_longest_first, orthogonalize

SHAPES = ((16, 8), (8, 24), (5, 5))


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def trained(optimizer: torch.optim.Optimizer, of: list[nn.Parameter], steps: int = 10) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in of:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def muon(of: list[nn.Parameter], nesterov: bool, dtype: torch.dtype) -> Muon:
    return Muon(
        [{"params": of, "weight_decay": 0.1, "orthogonal": True}],
        lr=0.01,
        betas=(0.9, 0.98),
        eps=1e-6,
        momentum=0.95,
        nesterov=nesterov,
        dtype=dtype,
    )


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # PyTorch's computes in bfloat16, which keeps 8 bits of a number; ten updates of 0.01 differ
    # in that share.
    [(torch.bfloat16, 1e-6), (torch.float32, 1e-2)],
    ids=["bf16", "fp32"],
)
def test_it_is_pytorchs_muon(nesterov: bool, dtype: torch.dtype, tolerance: float) -> None:
    of, others = parameters(), parameters()
    theirs = torch.optim.Muon(
        others, lr=0.01, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    trained(muon(of, nesterov, dtype), of)
    trained(theirs, others)
    for one, two in zip(of, others, strict=True):
        assert (one - two).norm() <= tolerance * two.norm()


@pytest.mark.parametrize("shape", [(32, 32), (48, 16), (16, 48), (1, 7)])
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalize(matrix, torch.float32)
    values = torch.diag(u.T @ found @ v.T)
    large = s > 0.05 * s.max()
    assert ((values[large] > 0.6) & (values[large] < 1.3)).all()
    torch.testing.assert_close(u @ torch.diag(values) @ v, found, rtol=1e-3, atol=1e-4)


def test_a_matrix_of_zeros_stays_so() -> None:
    assert torch.equal(orthogonalize(torch.zeros(3, 4), torch.float32), torch.zeros(3, 4))


def test_the_rest_is_adamw() -> None:
    of, others = parameters(), parameters()
    mine = Muon(
        [{"params": of, "weight_decay": 0.1, "orthogonal": False}],
        lr=0.01,
        betas=(0.9, 0.98),
        eps=1e-6,
        momentum=0.95,
        nesterov=True,
        dtype=torch.float32,
    )
    trained(mine, of)
    trained(
        torch.optim.AdamW(others, lr=0.01, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1), others
    )
    for one, two in zip(of, others, strict=True):
        torch.testing.assert_close(one, two)


def test_matrices_of_the_blocks_and_nothing_else() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.ModuleDict({"words": nn.Embedding(9, 4), "block": block, "head": nn.Linear(4, 9)})
    groups = MuonConfig(name="muon", lr=1e-3).groups(model, [block])
    assert {group.name: list(group.parameters) for group in groups} == {
        "matrices of the blocks": ["block.0.weight"],
        "weights": ["words.weight", "head.weight"],
        "biases and norms": ["block.0.bias", "block.1.weight", "block.1.bias", "head.bias"],
    }
    assert [(group.rule, group.weight_decay) for group in groups] == [
        ("Muon", 0.01),
        ("AdamW", 0.01),
        ("AdamW", 0.0),
    ]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 9))
def test_work_is_shared_out_evenly(costs: list[int], size: int) -> None:
    owners = assign_longest_first(costs, size)
    busy = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(size)]
    assert sum(busy) == sum(costs)
    # LPT: no rank has more than the mean and one piece
    assert max(busy) <= sum(costs) / size + max(costs)
