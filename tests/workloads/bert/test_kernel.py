"""Which kernel computes attention, and what is said where the one asked for is not there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elastrata.device.capabilities import DeviceCapabilities
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.build_model import missing_features
from elastrata_workloads.bert import Bert
from elastrata_workloads.unpadded import attention as attention_module
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments
from elastrata_workloads.unpadded.shapes import has_varlen
from support.synthetic import tiny_recipe

BF16, FP32 = torch.bfloat16, torch.float32
INSTEAD = "; using dense instead, one call per run of samples of equal length"


def machine(device: str, capability: tuple[int, int] | None) -> DeviceCapabilities:
    return DeviceCapabilities(
        device=device, capability=capability, has_bf16=True, missing_compiler=None
    )


@pytest.mark.parametrize(
    ("capability", "dtype", "there"),
    [
        (None, BF16, False),
        ((7, 5), BF16, False),
        ((8, 0), BF16, True),
        ((9, 0), torch.float16, True),
        ((10, 0), BF16, True),
        ((9, 0), FP32, False),
    ],
)
def test_where_there_is_varlen(capability, dtype, there) -> None:
    assert has_varlen(capability, dtype) is there


@pytest.mark.parametrize(
    ("size", "there"), [(64, True), (256, True), (26, False), (8, True), (264, False)]
)
def test_varlen_takes_some_sizes_of_heads(size: int, there: bool) -> None:
    assert has_varlen((9, 0), BF16, size) is there


def test_a_size_of_heads_without_a_kernel_is_told_and_computed_densely(monkeypatch) -> None:
    """TinyBERT's: 12 heads of 26 features."""
    bert, h100 = Bert(hidden_size=312, num_heads=12), machine("an H100", (9, 0))
    (line,) = bert.substitutions(h100, BF16)
    assert line == (
        "workload.attention: auto: unavailable for heads of 26, only for multiples of 8 up to 256"
        + INSTEAD
    )
    assert bert.interrupts_graphs(h100, BF16)
    monkeypatch.setattr(attention_module, "_capability", lambda query: (9, 0))
    qkv = [torch.randn(20, 2, 26, dtype=BF16) for _ in range(3)]
    segments = Segments(torch.tensor([0, 8, 20], dtype=torch.int32), (8, 12), 12)
    assert attention(*qkv, segments, "auto").shape == (20, 2, 26)  # varlen would raise on a CPU


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "lines"),
    [
        ("varlen", machine("this CPU", None), BF16, ["this CPU"]),
        ("varlen", machine("a Tesla T4", (7, 5)), BF16, ["a Tesla T4"]),
        ("varlen", machine("a Tesla T4", (7, 5)), FP32, ["a Tesla T4"]),
        ("varlen", machine("an H100", (9, 0)), FP32, ["fp32"]),
        ("varlen", machine("an H100", (9, 0)), BF16, []),
        ("auto", machine("this CPU", None), BF16, []),
        ("dense", machine("this CPU", None), BF16, []),
    ],
)
def test_only_what_is_asked_for_is_missed(kernel, device, dtype, lines) -> None:
    expected = [f"workload.attention: varlen: unavailable for {where}{INSTEAD}" for where in lines]
    assert Bert(attention=kernel).substitutions(device, dtype) == expected


@pytest.mark.parametrize(
    ("kernel", "device", "precision", "told"),
    [
        ("auto", machine("an H100", (9, 0)), "fp32", True),
        ("dense", machine("an H100", (9, 0)), "bf16", True),
        ("auto", machine("a Tesla T4", (7, 5)), "bf16", True),
        ("auto", machine("an H100", (9, 0)), "bf16", False),
        ("dense", machine("this CPU", None), "fp32", False),
    ],
)
def test_blocks_that_are_not_compiled_are_told(kernel, device, precision, told) -> None:
    values = tiny_recipe("data", "runs", precision=precision, compile=True)
    values["workload"]["attention"] = kernel
    for way in ("none", "selective", "full"):
        recipe = Recipe.model_validate({**values, "activation_checkpointing": way})
        lines = [line for line in missing_features(recipe, device) if line.startswith("compile")]
        assert len(lines) == (told and way == "selective")


def test_every_kernel_gives_the_same_here() -> None:
    qkv = [torch.randn(20, 2, 8) for _ in range(3)]
    segments = Segments(torch.tensor([0, 8, 16, 20], dtype=torch.int32), (8, 8, 4), 8)
    dense = attention(*qkv, segments, "dense")
    for kernel in ("auto", "varlen"):
        torch.testing.assert_close(attention(*qkv, segments, kernel), dense, rtol=0, atol=0)


def test_the_recipe_chooses_the_kernel(make_bert, make_rows, vocabulary, monkeypatch) -> None:
    """On a device that would have it: dense never calls it, the others do."""
    called = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        called.append(query)
        return value

    monkeypatch.setattr(attention_module, "varlen_attn", kernel)
    monkeypatch.setattr(attention_module, "has_varlen", lambda *_: True)
    counts = {}
    for name in ("auto", "varlen", "dense"):
        bert = make_bert(attention=name)
        batch = bert.collate(make_rows([9, 5]), vocabulary, seed=1)
        bert.loss(bert.build_model(vocabulary, 64), batch)
        counts[name] = len(called)
        called.clear()
    assert counts == {"auto": 2, "varlen": 2, "dense": 0}
