"""Counted FLOPs against PyTorch's own counter."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("style", ["gpt2", "llama", "mixed"])
def test_flops_are_those_pytorch_counts_with_attention_causal_halved(
    make_gpt, make_rows, vocabulary, style, packed
) -> None:
    gpt = make_gpt(style, embedding_multiple=64)
    model = gpt.build_model(vocabulary, 64)
    lengths = [30, 17, 17, 4]
    batch = gpt.collate(make_rows(lengths, packed=packed), vocabulary, seed=0)
    # The counter knows plain matrix products, masked halves included; CPU's fused attention it
    # does not know.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        gpt.loss(model, batch).terms["lm"].backward()
    masked = 6 * 2 * 32 * sum(length * length for length in lengths)
    found = gpt.flops(lengths, batch.weights, vocabulary)
    assert found == counter.get_total_flops() - masked


def test_work_is_the_forward_part_of_flops(make_gpt, vocabulary) -> None:
    gpt = make_gpt("llama")
    work = gpt.work(vocabulary)
    for length in (20, 40, 200):
        assert int(work(length)) == gpt.flops([length], {"lm": length}, vocabulary) // 3


def test_work_of_gpt2s_feed_forward_is_24_h2_s_and_2_h_s2_per_layer(make_gpt, vocabulary) -> None:
    h, layers = 32, 3
    work = make_gpt(num_layers=layers).work(vocabulary)
    assert work.linear == layers * 24 * h**2 + 2 * h * vocabulary.size
    assert work.quadratic == layers * 2 * h
