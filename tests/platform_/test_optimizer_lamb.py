"""LAMB against the paper's algorithm, written down once more in NumPy, and against timm's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from elastrata.optim.lamb import Lamb, LambConfig, trust_ratios

SHAPES = ((7, 5), (3, 4), (6,))
LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.98), 1e-6, 0.1
Array = np.ndarray


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES]


def lamb(of: Sequence[nn.Parameter], trust: tuple[float, float] = (0.0, float("inf"))) -> Lamb:
    groups = [
        {"params": list(of[:2]), "weight_decay": DECAY, "has_trust": True},
        {"params": list(of[2:]), "weight_decay": 0.0, "has_trust": False},
    ]
    return Lamb(groups, lr=LR, betas=BETAS, eps=EPS, trust=trust)


def gradients(step: int) -> list[Array]:
    rng = np.random.default_rng(step)
    return [rng.normal(size=shape) for shape in SHAPES]


def trained(optimizer: torch.optim.Optimizer, of: Sequence[nn.Parameter], steps: int) -> None:
    for step in range(steps):
        for parameter, gradient in zip(of, gradients(step), strict=True):
            parameter.grad = torch.tensor(gradient, dtype=parameter.dtype)
        optimizer.step()


def algorithm_2(x: list[Array], steps: int, bounds: tuple[float, float]) -> list[Array]:
    """You et al., arXiv 1904.00962, algorithm 2; the last tensor without decay and ratio."""
    x = [layer.copy() for layer in x]
    m, v = [0 * layer for layer in x], [0 * layer for layer in x]
    for t in range(1, steps + 1):
        for i, g in enumerate(gradients(t - 1)):
            m[i] = BETAS[0] * m[i] + (1 - BETAS[0]) * g
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * g**2
            m_hat, v_hat = m[i] / (1 - BETAS[0] ** t), v[i] / (1 - BETAS[1] ** t)
            r = m_hat / (np.sqrt(v_hat) + EPS)
            if i == len(x) - 1:
                x[i] = x[i] - LR * r
                continue
            update = r + DECAY * x[i]
            ratio = np.linalg.norm(x[i]) / np.linalg.norm(update)
            x[i] = x[i] - LR * np.clip(ratio, *bounds) * update
    return x


@pytest.mark.parametrize("bounds", [(0.0, float("inf")), (0.0, 0.5), (2.0, 10.0)])
def test_it_is_the_papers_algorithm(bounds: tuple[float, float]) -> None:
    of = parameters()
    wanted = algorithm_2([p.detach().numpy() for p in of], 50, bounds)
    trained(lamb(of, bounds), of, 50)
    for parameter, array in zip(of, wanted, strict=True):
        # float64 with some 50 roundings of 1e-16 each
        np.testing.assert_allclose(parameter.detach().numpy(), array, rtol=1e-12, atol=1e-13)


def test_it_is_timms_lamb() -> None:
    timm = pytest.importorskip("timm.optim.lamb")
    of, others = parameters(), parameters()
    groups = [
        {"params": others[:2], "weight_decay": DECAY},
        {"params": others[2:], "weight_decay": 0.0},
    ]
    theirs = timm.Lamb(groups, lr=LR, betas=BETAS, eps=EPS, max_grad_norm=None)
    trained(lamb(of), of, 50)
    trained(theirs, others, 50)
    for one, two in zip(of, others, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-13)


def test_without_weights_or_update_the_ratio_is_one() -> None:
    ratios = trust_ratios(torch.tensor([0.0, 3.0, 3.0]), torch.tensor([2.0, 0.0, 2.0]), 0.0, 10.0)
    assert ratios.tolist() == [1.0, 1.0, 1.5]


def test_weights_of_zero_and_gradients_of_zero_stay_finite() -> None:
    of = [
        nn.Parameter(torch.zeros(2, 3)),
        nn.Parameter(torch.ones(2, 3)),
        nn.Parameter(torch.ones(2)),
    ]
    optimizer = lamb(of)
    for _ in range(2):
        for parameter in of:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in of)
    assert torch.equal(of[0], torch.zeros(2, 3))
    of[0].grad = torch.ones(2, 3)
    optimizer.step()
    assert torch.isfinite(of[0]).all()
    assert of[0].abs().sum() > 0


def test_parameters_without_gradients_are_left_alone() -> None:
    of = parameters()
    before = of[0].detach().clone()
    optimizer = lamb(of)
    of[1].grad = torch.ones_like(of[1])
    optimizer.step()
    assert torch.equal(of[0], before)
    assert set(optimizer.state) == {of[1]}


def test_weights_have_a_trust_ratio_and_biases_have_none() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    config = LambConfig(name="lamb", lr=1e-3, weight_decay=0.0)
    built = config.build(config.groups(model, []))
    ranks = {group["has_trust"]: {p.ndim for p in group["params"]} for group in built.param_groups}
    assert ranks == {True: {2}, False: {1}}
