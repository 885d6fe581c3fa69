"""Counted FLOPs against PyTorch's own counter."""

from __future__ import annotations

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{}, {"intermediate_size": 40, "embedding_multiple": 64, "qk_norm": True, "z_loss": 0.1}],
)
def test_flops_are_those_pytorch_counts(make_bert, make_rows, vocabulary, pairs, sizes) -> None:
    bert = make_bert(next_sentence=pairs, **sizes)
    model = bert.build_model(vocabulary, 64)
    lengths = [30, 17, 17, 4]
    batch = bert.collate(make_rows(lengths, pairs=pairs), vocabulary, seed=0)
    # The counter knows plain matrix products; CPU's fused attention it does not know.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        sum(bert.loss(model, batch).terms.values()).backward()
    assert bert.flops(lengths, batch.weights, vocabulary) == counter.get_total_flops()


@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_number_of_a_block_is_counted(make_bert, vocabulary, qk_norm) -> None:
    bert = make_bert(qk_norm=qk_norm)
    (block, *_) = bert.blocks(bert.build_model(vocabulary, 64))
    counted = sum(parameter.numel() for parameter in block.parameters())
    assert bert.model_spec(vocabulary, 64).block_parameters == counted


def test_work_is_the_forward_part_of_flops(make_bert, vocabulary) -> None:
    bert = make_bert()
    work = bert.work(vocabulary)
    for length in (20, 40, 200):
        flops = bert.flops([length], {"mlm": round(0.15 * length)}, vocabulary)
        assert int(work(length)) == pytest.approx(flops / 3, rel=1e-4)
