"""The unpadded model against transformers' padded ones, and what padding-free must not change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from elastrata_workloads.gpt.hf import FAMILIES
from elastrata_workloads.gpt.model import GptModel

LENGTHS = (17, 17, 12, 11, 9, 9, 9, 3, 1)
# fp32 sums taken in another order: a few units in the last place of logits of size about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def reference(model: GptModel) -> tuple[torch.nn.Module, object]:
    """transformers' model of the same shape, with weights of its own, and how they are mapped."""
    if model.shape.positions == "rotary":
        family, config, kind = FAMILIES["llama"], LlamaConfig, LlamaForCausalLM
    else:
        family, config, kind = FAMILIES["gpt2"], GPT2Config, GPT2LMHeadModel
    values = family.to_config(model.shape)
    return kind(config(**values, attn_implementation="eager")), family


def padded(batch) -> dict[str, Tensor]:
    """The batch as transformers wants it: [n, longest] with padding and labels of -100."""
    lengths = list(batch.segment_lengths)
    rows = batch.input_ids.split(lengths)
    masks = [torch.ones(n, dtype=torch.long) for n in lengths]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


def mean_loss(gpt, model, batch) -> Tensor:
    return gpt.loss(model, batch).terms["lm"] / batch.weights["lm"]


@pytest.fixture(params=["gpt2", "llama", "mixed"])
def case(request, make_gpt, make_rows, vocabulary):
    gpt = make_gpt(request.param)
    batch = gpt.collate(make_rows(LENGTHS), vocabulary, seed=1)
    return gpt, gpt.build_model(vocabulary, 64), batch


@pytest.mark.parametrize("direction", ["ours to theirs", "theirs to ours"])
@pytest.mark.parametrize(
    ("style", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"tied_embeddings": False}),
        ("llama", {}),
        ("llama", {"num_kv_heads": None, "bias": True}),
        ("llama", {"num_kv_heads": 1, "tied_embeddings": True, "rotary_base": 500.0}),
    ],
)
def test_loss_logits_and_gradients_equal_those_of_transformers(
    make_gpt, make_rows, vocabulary, style, changes, direction
) -> None:
    gpt = make_gpt(style, **changes)
    model = gpt.build_model(vocabulary, 64)
    batch = gpt.collate(make_rows(LENGTHS), vocabulary, seed=1)
    other, family = reference(model)
    table = family.counterpart(model.shape)
    if direction == "ours to theirs":
        report = other.load_state_dict(dict(table.to_theirs(model.state_dict())), False)
        assert set(report.missing_keys) <= {"lm_head.weight"}
        assert not report.unexpected_keys
    else:
        model.load_state_dict(table.to_ours(table.origins, other.state_dict()))
    inputs = padded(batch)
    output = other(**inputs)
    output.loss.backward()
    mean_loss(gpt, model, batch).backward()

    theirs = output.logits[inputs["attention_mask"].bool()][batch.predicted]
    torch.testing.assert_close(model(batch), theirs, **CLOSE)
    torch.testing.assert_close(mean_loss(gpt, model, batch), output.loss, **CLOSE)
    mine = dict(table.to_theirs({n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(mine, {n: other.get_parameter(n).grad for n in mine}, **CLOSE)


def test_initialisation_is_that_of_gpt2(make_gpt, vocabulary) -> None:
    for style in ("gpt2", "llama"):
        gpt = make_gpt(style, hidden_size=128, intermediate_size=256, initializer_range=0.05)
        for name, value in gpt.build_model(vocabulary, 64).named_parameters():
            scale = 1 / math.sqrt(2 * 2) if "output" in name or "down" in name else 1.0
            if name.endswith("norm.weight"):
                assert (value == 1).all(), name
            elif name.endswith("bias"):
                assert (value == 0).all(), name
            else:
                assert value.std().item() == pytest.approx(0.05 * scale, rel=0.12), name


def test_a_token_sees_itself_and_those_before_it_alone(case) -> None:
    """Where one token is replaced, logits before it stay to the bit, and its own change."""
    _, model, batch = case
    place = 17 + 8
    changed = batch.input_ids.clone()
    changed[place] = (changed[place] + 1) % 97
    before, after = model(batch), model(type(batch)(**{**vars(batch), "input_ids": changed}))
    differs = (before != after).any(dim=-1)
    inside = (batch.predicted >= place) & (batch.predicted < 34)
    assert torch.equal(differs, inside)


def test_loss_does_not_depend_on_how_rows_are_split(case, make_rows, vocabulary) -> None:
    gpt, model, whole = case
    rows = make_rows(LENGTHS)
    parts = [gpt.collate(part, vocabulary, seed=1) for part in (rows[:3], rows[3:3], rows[3:])]
    losses = [gpt.loss(model, part) for part in parts]
    expected = gpt.loss(model, whole)
    torch.testing.assert_close(
        sum(one.terms["lm"] for one in losses), expected.terms["lm"], **CLOSE
    )
    right = sum(one.metrics["lm_accuracy"].total for one in losses)
    assert right == expected.metrics["lm_accuracy"].total
    assert sum(part.weights["lm"] for part in parts) == whole.weights["lm"]


def test_packed_documents_equal_the_documents_alone(case, make_rows, vocabulary) -> None:
    gpt, model, _ = case
    documents = (9, 5, 13, 1)
    alone, packed = (
        gpt.collate(make_rows(documents, packed=p), vocabulary, seed=1) for p in (False, True)
    )
    assert packed.segment_lengths == documents
    assert packed.positions.tolist() == alone.positions.tolist()
    assert packed.weights == alone.weights == {"lm": 8.0 + 4.0 + 12.0}
    torch.testing.assert_close(model(packed), model(alone), rtol=0, atol=0)
    torch.testing.assert_close(gpt.loss(model, packed).terms, gpt.loss(model, alone).terms)


def test_every_token_but_the_last_predicts_the_next(make_gpt, make_rows, vocabulary) -> None:
    batch = make_gpt().collate(make_rows((4, 1, 3)), vocabulary, seed=1)
    tokens = batch.input_ids.tolist()
    assert batch.predicted.tolist() == [0, 1, 2, 5, 6]
    assert batch.targets.tolist() == [*tokens[1:4], *tokens[6:8]]


def test_an_empty_batch_gives_zero_sums_and_zero_gradients(case, make_rows, vocabulary) -> None:
    gpt, model, _ = case
    batch = gpt.collate(make_rows([]), vocabulary, seed=1)
    assert batch.weights == {"lm": 0.0}
    loss = gpt.loss(model, batch)
    assert loss.terms["lm"].item() == loss.metrics["lm_accuracy"].total.item() == 0
    loss.terms["lm"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_loss_with_dropout_does_not_depend_on_the_split(make_gpt, make_rows, vocabulary) -> None:
    gpt, rows = make_gpt("llama", dropout=0.2), make_rows([20, 13, 13, 7])
    model = gpt.build_model(vocabulary, 64)

    def sum_of(*parts) -> Tensor:
        return sum(gpt.loss(model, gpt.collate(p, vocabulary, 0)).terms["lm"] for p in parts)

    whole = sum_of(rows)
    torch.testing.assert_close(sum_of(rows[:1], rows[1:3], rows[3:]), whole, rtol=1e-5, atol=0)
    model.eval()
    assert sum_of(rows) != whole
