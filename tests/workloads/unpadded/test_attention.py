"""Attention over segments against its definition, and what the kernel of GPUs is asked for."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from elastrata_workloads.unpadded import attention as attention_module
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.shapes import shares_heads

LENGTHS = (6, 6, 1, 4)
SEGMENTS = Segments(torch.tensor([0, 6, 12, 13, 17], dtype=torch.int32), LENGTHS, 8)


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: int | None = None,
    lengths: tuple[int, ...] = LENGTHS,
) -> Tensor:
    """One head after the other, over all tokens, with a mask."""
    places = torch.arange(sum(lengths))
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = segment[:, None] == segment
    if causal:
        seen &= places[:, None] >= places
    if window is not None:
        seen &= (places[:, None] - places).abs() <= window
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
@pytest.mark.parametrize("window", [1, 3, 8, 40])
def test_attention_within_a_window_has_the_values_and_gradients_of_its_definition(
    causal: bool, kv_heads: int, window: int
) -> None:
    """Samples of many blocks, of one, and shorter than the window."""
    lengths = (23, 9, 9, 2)
    segments = Segments(torch.tensor([0, 23, 32, 41, 43], dtype=torch.int32), lengths, 32)
    torch.manual_seed(0)
    tensors = [torch.randn(43, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    found = []
    for given in ({"segments": segments}, {"lengths": lengths}):
        form: Callable[..., Tensor] = attention if "segments" in given else by_definition
        *leaves, weight = [tensor.clone().requires_grad_() for tensor in tensors]
        out = form(*leaves, causal=causal, window=window, **given)
        (out * weight).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for ours, definition in zip(*found, strict=True):
        torch.testing.assert_close(ours, definition)


def _kernel_of_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What torch's does, with its signature before 2.12: as many heads of each."""
    assert query.shape == key.shape == value.shape
    assert torch.equal(cu_seq_q, SEGMENTS.offsets)
    return by_definition(query, key, value, causal=window_size == (-1, 0))


def _kernel_of_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Likewise since then: fewer heads of key and value, where that is said."""
    assert enable_gqa == (query.shape != key.shape)
    assert max_q == max_k == SEGMENTS.longest
    return by_definition(query, key, value, causal=window_size == (-1, 0))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("kernel", [_kernel_of_2_11, _kernel_of_2_12])
def test_the_kernel_of_gpus_is_asked_for_the_same(
    kernel: Callable[..., Tensor], causal: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on GPUs alone: a window of nothing to the right is what it calls causal."""
    monkeypatch.setattr(attention_module, "varlen_attn", kernel)
    monkeypatch.setattr(attention_module, "_SHARES_HEADS", shares_heads(kernel))
    monkeypatch.setattr(attention_module, "has_varlen", lambda *_: True)
    query, key, value = (torch.randn(17, heads, 8) for heads in (4, kv_heads, kv_heads))
    found = attention(query, key, value, SEGMENTS, causal=causal)
    torch.testing.assert_close(found, by_definition(query, key, value, causal=causal))


def test_the_kernel_that_is_installed_takes_what_it_is_asked() -> None:
    parameters = signature(varlen_attn).parameters
    assert "window_size" in parameters
    assert shares_heads(varlen_attn) == ("enable_gqa" in parameters)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_in_a_graph_it_is_the_same(causal: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(17, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    in_graph = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    for form in (attention, in_graph):
        *leaves, weight = [tensor.clone().requires_grad_() for tensor in tensors]
        out = form(*leaves, SEGMENTS, causal=causal)
        (out * weight).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    for graphs, plain in zip(*found, strict=True):
        torch.testing.assert_close(graphs, plain)
