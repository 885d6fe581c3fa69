"""Counted FLOPs against PyTorch's own counter."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from elastrata.planner.activations import block_activations
from elastrata.planner.layout import Layout
from elastrata.planner.stack import engine_stack
from support.live_bytes import LiveBytes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("style", ["gpt2", "llama", "mixed", "stable"])
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
        sum(gpt.loss(model, batch).terms.values()).backward()
    masked = 6 * 2 * 32 * sum(length * length for length in lengths)
    found = gpt.flops(lengths, batch.weights, vocabulary)
    assert found == counter.get_total_flops() - masked


@pytest.mark.parametrize(
    ("style", "changes"),
    [("gpt2", {}), ("gpt2", {"qk_norm": True}), ("llama", {}), ("stable", {}), ("mixed", {})],
)
def test_every_number_of_a_block_is_counted(make_gpt, vocabulary, style, changes) -> None:
    gpt = make_gpt(style, **changes)
    block = gpt.build_model(vocabulary, 64).blocks[0]
    counted = sum(parameter.numel() for parameter in block.parameters())
    assert gpt.model_spec(vocabulary, 64).block_parameters == counted


def test_normalised_queries_keep_what_the_planner_counts(make_gpt, make_rows, vocabulary) -> None:
    kept, planned = [], []
    for qk_norm in (False, True):
        gpt = make_gpt("gpt2", qk_norm=qk_norm)
        model = gpt.build_model(vocabulary, 64)
        batch = gpt.collate(make_rows([64, 64]), vocabulary, seed=0)
        with LiveBytes() as live:
            hidden = model.embeddings(batch.input_ids, batch.positions, None)
            hidden = model.blocks[0](hidden, batch.segments, batch.positions, None)
        kept.append(live.peak)
        spec, layout = gpt.model_spec(vocabulary, 64), Layout(micro_batch=2)
        planned.append(block_activations(spec, engine_stack("fp32", "fp32"), layout))
    assert planned[1] - planned[0] == 128 * 4 * (32 + 32)
    of_heads = 128 * 8 * 2 * 4  # mean and deviation of each: few beside heads of 64 and more
    assert kept[1] - kept[0] == pytest.approx(planned[1] - planned[0] + of_heads, rel=0.05)


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
