"""A model divided into stages is the same model."""

from __future__ import annotations

import pytest
import torch

from elastrata.pipeline.stages import stage_spans

WORDS = "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize("pairs", [False, True])
def test_stages_one_after_the_other_are_the_model(pairs, make_bert, make_rows, vocabulary) -> None:
    bert = make_bert(num_layers=4, dropout=0.1, next_sentence=pairs, embedding_multiple=64)
    model = bert.build_model(vocabulary, 64)
    batch = bert.collate(make_rows((30, 21, 9), pairs=pairs), vocabulary, seed=0)
    stages = [bert.stage(model, blocks) for blocks in ([0], [1, 2], [3])]
    hidden = stages[0](batch)
    assert hidden.shape == bert.hidden_shape(batch)
    found = stages[2](batch, hidden=stages[1](batch, hidden=hidden))
    for one, other in zip(found, model(batch), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_parameters_keep_their_names_and_only_the_table_of_words_is_in_two(
    make_bert, vocabulary
) -> None:
    bert = make_bert(num_layers=4, next_sentence=True)
    model = bert.build_model(vocabulary, 64)
    stages = [dict(bert.stage(model, b).named_parameters()) for b in ([0, 2], [1], [3])]
    whole = dict(model.named_parameters())
    assert set().union(*stages) == set(whole)
    assert all(whole[name] is value for stage in stages for name, value in stage.items())
    assert stages[0].keys() & stages[2].keys() == {WORDS}
    assert not stages[1].keys() & (stages[0].keys() | stages[2].keys())
    layer = model.bert.encoder.layer
    assert bert.blocks(bert.stage(model, [0, 2])) == [layer[0], layer[2]]
    assert dict(bert.stage(model, range(4)).named_parameters()).keys() == whole.keys()


@pytest.mark.parametrize("pairs", [False, True])
def test_micro_batches_are_filled_up_to_one_length(pairs, make_bert, make_rows, vocabulary) -> None:
    bert = make_bert(next_sentence=pairs)
    model = bert.build_model(vocabulary, 64)
    parts = [
        bert.collate(make_rows(lengths, pairs=pairs), vocabulary, 0)
        for lengths in ((30, 21), (9,), ())
    ]
    filled = bert.pad_to_one_length(parts, 8)
    assert {batch.num_positions for batch in filled} == {56}
    for part, batch in zip(parts, filled, strict=True):
        assert batch.weights == part.weights
        torch.testing.assert_close(bert.loss(model, batch).terms, bert.loss(model, part).terms)


def test_heads_make_the_last_stage_short(make_bert, vocabulary) -> None:
    bert = make_bert(num_layers=8)
    small, length = bert.block_costs(vocabulary, 64), 64
    large = bert.block_costs(vocabulary.model_copy(update={"size": 20_000}), length)
    assert len(small) == len(large) == 8
    assert len(set(small[1:-1])) == 1
    assert len(stage_spans(large, 2)[1]) < len(stage_spans(small, 2)[1])
    additions = 2 * bert.hidden_size * length
    assert sum(small) - additions == pytest.approx(int(bert.work(vocabulary)(length)), rel=0.02)
