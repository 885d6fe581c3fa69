"""The unpadded model against transformers' padded one, and what padding-free must not change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from elastrata_workloads.bert.model import BertModel

LENGTHS = (17, 17, 12, 11, 9, 9, 9, 3)
# fp32 sums taken in another order: a few units in the last place of logits of size about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def reference(model: BertModel) -> torch.nn.Module:
    """transformers' model of the same shape, with weights of its own."""
    shape = model.shape
    config = BertConfig(
        vocab_size=shape.num_ids,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return (BertForPreTraining if shape.next_sentence else BertForMaskedLM)(config)


def padded(batch) -> dict[str, Tensor]:
    """The batch as transformers wants it: [n, longest] with padding and labels of -100."""
    lengths = list(batch.segment_lengths)
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.predicted] = batch.targets
    pad = {"batch_first": True}
    inputs = {
        "input_ids": pad_sequence(batch.input_ids.split(lengths), **pad),
        "attention_mask": pad_sequence([torch.ones(n, dtype=torch.long) for n in lengths], **pad),
        "labels": pad_sequence(labels.split(lengths), padding_value=-100, **pad),
    }
    if batch.token_types is not None:
        inputs["token_type_ids"] = pad_sequence(batch.token_types.split(lengths), **pad)
    if batch.not_next is not None:
        inputs["next_sentence_label"] = batch.not_next
    return inputs


def mean_loss(bert, model, batch) -> Tensor:
    terms = bert.loss(model, batch).terms
    return sum(total / batch.weights[name] for name, total in terms.items())


@pytest.fixture(params=[False, True], ids=["mlm", "mlm+nsp"])
def case(request, make_bert, make_rows, vocabulary):
    bert = make_bert(next_sentence=request.param)
    batch = bert.collate(make_rows(LENGTHS, pairs=request.param), vocabulary, seed=1)
    return bert, bert.build_model(vocabulary, 64), batch


@pytest.mark.parametrize("direction", ["ours to theirs", "theirs to ours"])
def test_loss_logits_and_gradients_equal_those_of_transformers(case, direction) -> None:
    bert, model, batch = case
    other = reference(model)
    if direction == "ours to theirs":
        other.load_state_dict(model.state_dict(), strict=False)
    else:
        model.load_state_dict(dict(other.named_parameters()))
    output = other(**padded(batch))
    output.loss.backward()
    mean_loss(bert, model, batch).backward()

    logits, next_logits = model(batch)
    their_logits = output.prediction_logits if bert.next_sentence else output.logits
    real = padded(batch)["attention_mask"].bool()
    torch.testing.assert_close(logits, their_logits[real][batch.predicted], **CLOSE)
    if bert.next_sentence:
        torch.testing.assert_close(next_logits, output.seq_relationship_logits, **CLOSE)
    torch.testing.assert_close(mean_loss(bert, model, batch), output.loss, **CLOSE)
    gradients = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(
        gradients, {name: p.grad for name, p in other.named_parameters()}, **CLOSE
    )


def test_initialisation_is_that_of_transformers_in_distribution(make_bert, vocabulary) -> None:
    bert = make_bert(hidden_size=128, initializer_range=0.05)
    model = bert.build_model(vocabulary, 64)
    for name, value in model.named_parameters():
        if name.endswith("LayerNorm.weight"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            assert value.std().item() == pytest.approx(0.05, rel=0.12), name
    assert not model.bert.embeddings.word_embeddings.weight[vocabulary.pad_id].any()


def test_loss_does_not_depend_on_how_rows_are_split(case, make_rows, vocabulary) -> None:
    bert, model, whole = case
    rows = make_rows(LENGTHS, pairs=bert.next_sentence)
    parts = [bert.collate(part, vocabulary, seed=1) for part in (rows[:3], rows[3:3], rows[3:])]
    expected = bert.loss(model, whole)
    for name, total in expected.terms.items():
        split = sum(bert.loss(model, part).terms[name] for part in parts)
        torch.testing.assert_close(split, total, **CLOSE)
    for name, metric in expected.metrics.items():
        assert sum(bert.loss(model, part).metrics[name].total for part in parts) == metric.total


def test_packed_documents_equal_the_documents_alone(make_bert, make_rows, vocabulary) -> None:
    bert = make_bert()
    model = bert.build_model(vocabulary, 64)
    documents = (9, 5, 13)
    alone = bert.collate(make_rows(documents), vocabulary, seed=1)
    packed_rows = dataclasses.replace(
        make_rows(documents),
        sample_ids=np.array([7], np.uint64),
        epochs=np.zeros(1, np.int64),
        lengths=np.array([27]),
        boundaries=(np.array([9, 14], np.int32),),
    )
    packed = bert.collate(packed_rows, vocabulary, seed=1)
    assert packed.segment_lengths == documents
    assert packed.positions.tolist() == alone.positions.tolist()
    same_masks = dataclasses.replace(
        packed, input_ids=alone.input_ids, predicted=alone.predicted, targets=alone.targets
    )
    torch.testing.assert_close(model(same_masks), model(alone), rtol=0, atol=0)


def test_an_empty_batch_gives_zero_sums_and_zero_gradients(case, make_rows, vocabulary) -> None:
    bert, model, _ = case
    batch = bert.collate(make_rows([], pairs=bert.next_sentence), vocabulary, seed=1)
    assert not any(batch.weights.values())
    loss = bert.loss(model, batch)
    assert all(total.item() == 0 for total in loss.terms.values())
    assert all(metric.total.item() == 0 for metric in loss.metrics.values())
    sum(loss.terms.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
