"""Rotary positions."""

from __future__ import annotations

import torch

from elastrata_workloads.unpadded.attention import rotate


def _product(query: torch.Tensor, key: torch.Tensor, places: tuple[int, int]) -> torch.Tensor:
    turned = [
        rotate(x[None, None], torch.tensor([place]), 10_000.0)
        for x, place in zip((query, key), places, strict=True)
    ]
    return (turned[0] * turned[1]).sum()


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 64)
    near = _product(query, key, (7, 3))
    # fp32 angles of size 1,000: a relative error of 1e-7 of each.
    torch.testing.assert_close(_product(query, key, (1007, 1003)), near, rtol=1e-3, atol=1e-3)
    assert abs(_product(query, key, (8, 3)) - near) > 0.1


def test_bf16_tells_neighbouring_positions_apart() -> None:
    """Angles are fp32: as bf16 numbers, positions 2000 and 2001 would be the same."""
    heads = torch.randn(1, 1, 64).expand(2, 1, 64).to(torch.bfloat16)
    low = rotate(heads, torch.tensor([2000, 2001]), 10_000.0)
    exact = rotate(heads.float(), torch.tensor([2000, 2001]), 10_000.0)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, rtol=2**-8, atol=1e-6)
    assert not torch.equal(low[0], low[1])
