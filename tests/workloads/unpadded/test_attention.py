"""Attention over segments against its definition, and what the kernel of GPUs is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from elastrata_workloads.unpadded import attention as attention_module
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments

LENGTHS = (6, 6, 1, 4)
SEGMENTS = Segments(torch.tensor([0, 6, 12, 13, 17], dtype=torch.int32), LENGTHS, 8)


def by_definition(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """One head after the other, over all tokens, with a mask."""
    places = torch.arange(sum(LENGTHS))
    segment = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    seen = segment[:, None] == segment
    if causal:
        seen &= places[:, None] >= places
    heads, size = query.shape[1:]
    shared = heads // key.shape[1]
    out = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // shared].T / size**0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out.append(weights @ value[:, head // shared])
    return torch.stack(out, dim=1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_attention_is_what_its_definition_says(causal: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(17, heads, 8) for heads in (4, kv_heads, kv_heads))
    found = attention(query, key, value, SEGMENTS, causal=causal)
    torch.testing.assert_close(found, by_definition(query, key, value, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_kernel_of_gpus_is_asked_for_the_same(
    causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on GPUs alone: a window of nothing to the right is what it calls causal."""
    asked: dict[str, Any] = {}

    def kernel(query: Tensor, *others: object, **options: object) -> Tensor:
        asked.update(options)
        return query

    monkeypatch.setattr(attention_module, "varlen_attn", kernel)
    monkeypatch.setattr(attention_module, "has_varlen", lambda capability, dtype: True)
    query, key = torch.randn(17, 4, 8), torch.randn(17, kv_heads, 8)
    attention(query, key, key, SEGMENTS, causal=causal)
    assert asked == {
        "window_size": (-1, 0 if causal else -1),
        **({"enable_gqa": True} if kv_heads != 4 else {}),
    }
