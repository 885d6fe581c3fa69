"""The unpadded model against transformers' padded one, at lengths within the window and beyond."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ModernBertConfig, ModernBertForMaskedLM

from elastrata_workloads.modernbert.hf import counterpart, find_unsupported, from_config, to_config
from elastrata_workloads.modernbert.model import ModernBertModel

MIXED = (70, 70, 41, 25, 24, 9, 9, 5, 4, 1)
"""With 4 tokens to each side: in blocks, at once with a mask, and with every token in reach."""
# fp32 sums taken in another order: a few units in the last place of logits of size about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def reference(model: ModernBertModel, **changes: object) -> ModernBertForMaskedLM:
    """transformers' model of the same shape, with weights of its own."""
    config = ModernBertConfig(**to_config(model.shape), **changes, attn_implementation="eager")
    return ModernBertForMaskedLM(config)


def padded(batch) -> dict[str, Tensor]:
    """The batch as transformers wants it: [n, longest] with padding and labels of -100."""
    lengths = list(batch.segment_lengths)
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.predicted] = batch.targets
    pad = {"batch_first": True}
    return {
        "input_ids": pad_sequence(batch.input_ids.split(lengths), **pad),
        "attention_mask": pad_sequence([torch.ones(n, dtype=torch.long) for n in lengths], **pad),
        "labels": pad_sequence(labels.split(lengths), padding_value=-100, **pad),
    }


@pytest.mark.parametrize("direction", ["ours to theirs", "theirs to ours"])
@pytest.mark.parametrize(
    ("lengths", "changes"),
    [
        (MIXED, {}),
        ((100,), {"global_every": 2, "global_rotary_base": 500.0, "local_rotary_base": 50.0}),
        ((9, 7), {"num_layers": 2, "window": 128}),
    ],
)
def test_loss_logits_and_gradients_equal_those_of_transformers(
    make_modernbert, make_rows, vocabulary, lengths, changes, direction
) -> None:
    workload = make_modernbert(**changes)
    model = workload.build_model(vocabulary, 128)
    batch = workload.collate(make_rows(lengths), vocabulary, seed=1)
    other, table = reference(model), counterpart(model.shape)
    if direction == "ours to theirs":
        report = other.load_state_dict(dict(table.to_theirs(model.state_dict())), strict=False)
        assert report.missing_keys == ["decoder.weight"]
        assert not report.unexpected_keys
    else:
        ours = table.to_ours(model.state_dict(), other.state_dict())
        model.load_state_dict(ours)
    inputs = padded(batch)
    output = other(**inputs)
    output.loss.backward()
    mean = workload.loss(model, batch).terms["mlm"] / batch.weights["mlm"]
    mean.backward()

    theirs = output.logits[inputs["attention_mask"].bool()][batch.predicted]
    torch.testing.assert_close(model(batch), theirs, **CLOSE)
    torch.testing.assert_close(mean, output.loss, **CLOSE)
    mine = dict(table.to_theirs({n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(mine, {n: other.get_parameter(n).grad for n in mine}, **CLOSE)


def test_a_local_layer_sees_its_window_alone(make_modernbert, make_rows, vocabulary) -> None:
    """Of two layers the first one is global; with a first that hears nothing, what a token changes
    is four tokens away at most."""
    workload = make_modernbert(num_layers=2)
    model = workload.build_model(vocabulary, 128)
    torch.nn.init.zeros_(model.blocks[0].attention.output.weight)
    batch = workload.collate(make_rows([60]), vocabulary, seed=1)
    every = {**vars(batch), "predicted": torch.arange(60), "targets": batch.input_ids}
    changed = batch.input_ids.clone()
    changed[30] = (changed[30] + 1) % 97
    before = model(type(batch)(**every))
    after = model(type(batch)(**{**every, "input_ids": changed}))
    differs = (before != after).any(dim=-1).nonzero().flatten()
    assert differs.tolist() == list(range(26, 35))


def test_initialisation_is_that_of_transformers_in_distribution(
    make_modernbert, vocabulary
) -> None:
    workload = make_modernbert(hidden_size=128, initializer_range=0.05)
    model = workload.build_model(vocabulary, 128)
    table = counterpart(model.shape)
    theirs = table.to_ours(model.state_dict(), reference(model).state_dict())
    for name, value in model.named_parameters():
        if value.ndim == 1 or name.startswith("embeddings"):
            continue  # see below
        assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05), name
        assert value.abs().max() <= theirs[name].abs().max() * 1.02
    for name, value in model.named_parameters():
        if value.ndim == 1:
            torch.testing.assert_close(value, theirs[name], rtol=0, atol=0)
    tokens = model.embeddings.tokens.weight
    # A normal cut at two deviations has 0.88 of its deviation. transformers draws the tied decoder
    # last, smaller by sqrt(2 L); the authors' own code has the embeddings' deviation.
    assert tokens.std().item() == pytest.approx(0.05 * 0.88, rel=0.05)
    assert not tokens[vocabulary.pad_id].any()


def test_configurations_go_both_ways(make_modernbert, vocabulary) -> None:
    workload = make_modernbert(global_every=2, global_rotary_base=1e4)
    config = ModernBertConfig(**to_config(workload.shape(vocabulary)))
    assert find_unsupported(config) == []
    settings = from_config(config)
    assert type(workload)(**settings).architecture() == workload.architecture()
    published = ModernBertConfig()
    assert type(workload)(**from_config(published)).architecture() == (
        type(workload)().architecture()
    )


@pytest.mark.parametrize(
    ("values", "lacking"),
    [
        ({"norm_bias": True, "mlp_bias": True}, ["norm_bias", "mlp_bias"]),
        ({"hidden_activation": "silu"}, ["hidden_activation silu"]),
        ({"decoder_bias": False}, ["decoder_bias false"]),
        ({"tie_word_embeddings": False}, ["tie_word_embeddings false"]),
        ({"local_attention": 7}, ["local_attention 7"]),
        (
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
            ["layer_types ['sliding_attention', 'full_attention']"],
        ),
    ],
)
def test_what_our_model_lacks_is_named(values, lacking) -> None:
    assert find_unsupported(ModernBertConfig(**values)) == lacking


def test_an_empty_batch_gives_zero_sums_and_zero_gradients(
    make_modernbert, make_rows, vocabulary
) -> None:
    workload = make_modernbert(attention_dropout=0.1)
    model = workload.build_model(vocabulary, 128)
    loss = workload.loss(model, workload.collate(make_rows([]), vocabulary, seed=1))
    assert loss.terms["mlm"].item() == 0
    loss.terms["mlm"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
