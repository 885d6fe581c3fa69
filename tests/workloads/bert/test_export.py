"""Exported folders in the hands of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    PreTrainedTokenizerFast,
    pipeline,
)

from elastrata_pipelines.errors import UserError
from elastrata_workloads.bert import Bert

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.fixture
def tokenizer_folder(tmp_path: Path, vocabulary) -> Path:
    words = [*SPECIAL, *(f"w{i}" for i in range(vocabulary.size - len(SPECIAL)))]
    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = tmp_path / "tokenizer"
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **dict(zip(names, SPECIAL, strict=True))
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("auto", "changes"),
    [
        (AutoModelForMaskedLM, {}),
        (AutoModelForMaskedLM, {"embedding_multiple": 64}),
        (BertForPreTraining, {"next_sentence": True}),
    ],
)
def test_export_loads_whole_and_gives_equal_logits(
    make_bert, make_rows, vocabulary, tokenizer_folder, tmp_path, auto, changes
) -> None:
    bert = make_bert(**changes)
    model = bert.build_model(vocabulary, 64)
    bert.export(model.state_dict(), vocabulary, 64, tokenizer_folder, tmp_path / "model")
    loaded, report = auto.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report

    rows = make_rows([20], pairs=bert.next_sentence)
    batch = bert.collate(rows, vocabulary, seed=0)
    logits, next_logits = model.eval()(batch)
    types = None if batch.token_types is None else batch.token_types[None]
    output = loaded.eval()(batch.input_ids[None], token_type_ids=types)
    theirs = output[0][0, batch.predicted]
    # The same fp32 weights, but sums in another order: a few units in the last place.
    ours = logits[:, : vocabulary.size]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if bert.next_sentence:
        torch.testing.assert_close(
            next_logits, output.seq_relationship_logits, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_a_bert_of_any_activation_gives_equal_logits_and_exports_the_same(
    activation: str, make_bert, make_rows, vocabulary, tmp_path
) -> None:
    plain = make_bert()
    sizes = {
        "vocab_size": vocabulary.size,
        "hidden_size": plain.hidden_size,
        "num_hidden_layers": plain.num_layers,
        "num_attention_heads": plain.num_heads,
        "intermediate_size": 40,
        "pad_token_id": vocabulary.pad_id,
    }
    theirs = BertForMaskedLM(BertConfig(**sizes, hidden_act=activation, initializer_range=0.5))
    theirs.eval()
    bert = Bert.model_validate(Bert.settings_of(theirs.config))
    model = bert.build_model(vocabulary, 64)
    ours = dict(model.named_parameters())
    model.load_state_dict(bert.counterpart(vocabulary).to_ours(ours, theirs.state_dict()))
    for length in (20, 7, 2):
        batch = bert.collate(make_rows([length]), vocabulary, seed=0)
        expected = theirs(batch.input_ids[None]).logits[0, batch.predicted]
        torch.testing.assert_close(model.eval()(batch)[0], expected, rtol=1e-5, atol=1e-5)
    bert.export(model.state_dict(), vocabulary, 64, None, tmp_path / "ours")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours")
    assert again.config.hidden_act == activation
    torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(UserError, match=r"^workload bert has no hidden_act tanh$"):
        Bert.settings_of(BertConfig(hidden_act="tanh"))


def test_normalised_queries_are_refused(make_bert, vocabulary, tmp_path) -> None:
    with pytest.raises(UserError, match=r"workload.qk_norm: true: transformers has no such model"):
        make_bert(qk_norm=True).export({}, vocabulary, 64, None, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_fill_mask_finds_the_tokenizer(make_bert, vocabulary, tokenizer_folder, tmp_path) -> None:
    bert = make_bert()
    model = bert.build_model(vocabulary, 64)
    bert.export(model.state_dict(), vocabulary, 64, tokenizer_folder, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("w3 w4")["input_ids"] == [2, 8, 9, 3]
    fill = pipeline("fill-mask", model=str(tmp_path / "model"), device="cpu")
    filled = fill("w3 [MASK] w4")
    assert len(filled) == 5
    assert all(np.isfinite(guess["score"]) and guess["token_str"] for guess in filled)
