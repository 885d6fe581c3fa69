"""A model divided into stages is the same model."""

from __future__ import annotations

import pytest
import torch

from elastrata.pipeline.stages import stage_spans


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_stages_one_after_the_other_are_the_model(style, make_gpt, make_rows, vocabulary) -> None:
    gpt = make_gpt(style, num_layers=4, dropout=0.1)
    model = gpt.build_model(vocabulary, 64)
    batch = gpt.collate(make_rows((30, 21, 9)), vocabulary, seed=0)
    stages = [gpt.stage(model, blocks) for blocks in ([0], [1, 2], [3])]
    hidden = stages[0](batch)
    assert hidden.shape == gpt.hidden_shape(batch)
    logits = stages[2](batch, hidden=stages[1](batch, hidden=hidden))
    torch.testing.assert_close(logits, model(batch), rtol=0, atol=0)


@pytest.mark.parametrize("style", ["gpt2", "llama"])
def test_parameters_keep_their_names_and_only_a_tied_table_is_in_two(
    style, make_gpt, vocabulary
) -> None:
    gpt = make_gpt(style, num_layers=4)
    model = gpt.build_model(vocabulary, 64)
    stages = [dict(gpt.stage(model, b).named_parameters()) for b in ([0, 2], [1], [3])]
    whole = dict(model.named_parameters())
    assert set().union(*stages) == set(whole)
    assert all(whole[name] is value for stage in stages for name, value in stage.items())
    twice = {"embeddings.tokens.weight"} if gpt.tied_embeddings else set()
    assert stages[0].keys() & stages[2].keys() == twice
    assert not stages[1].keys() & (stages[0].keys() | stages[2].keys())
    assert gpt.blocks(gpt.stage(model, [0, 2])) == [model.blocks[0], model.blocks[2]]


def test_micro_batches_are_filled_up_to_one_length(make_gpt, make_rows, vocabulary) -> None:
    gpt = make_gpt()
    model = gpt.build_model(vocabulary, 64)
    parts = [gpt.collate(make_rows(lengths), vocabulary, 0) for lengths in ((30, 21), (9,), ())]
    filled = gpt.pad_to_one_length(parts, 8)
    assert {batch.num_positions for batch in filled} == {56}
    assert {len(batch.input_ids) for batch in filled} == {56}
    for part, batch in zip(parts, filled, strict=True):
        assert batch.weights == part.weights
        torch.testing.assert_close(gpt.loss(model, batch).terms, gpt.loss(model, part).terms)


def test_a_large_vocabulary_makes_the_last_stage_short(make_gpt, vocabulary) -> None:
    gpt = make_gpt(num_layers=8)
    small = gpt.block_costs(vocabulary, 64)
    large = gpt.block_costs(vocabulary.model_copy(update={"size": 4000}), 64)
    assert len(small) == len(large) == 8
    assert len(set(small[1:-1])) == 1
    assert len(stage_spans(large, 2)[1]) < len(stage_spans(small, 2)[1])
