"""What the engine and its users are told."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from elastrata.step.evaluate import evaluate, evaluation_metrics
from elastrata.step.forward_backward import WholeModel
from elastrata.workload.workload import workload_class
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.preparation import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_workloads.bert import Bert


def manifest(**changes) -> Manifest:
    vocabulary = Vocabulary(
        size=9, pad_id=0, mask_id=4, special_ids=(0, 1, 2, 3, 4), continuation_ids=()
    )
    values = {
        "samples": 1,
        "tokens": 2,
        "stripes": 1,
        "stripe_size": 1,
        "seq_len": 512,
        "seed": 0,
        "packing": "none",
        "pairs": False,
        "token_dtype": "uint16",
        "length_histogram": (0, 0, 1),
        "vocabulary": vocabulary,
        "tokenizer_fingerprint": "",
        "sources": (),
        "files": (),
    }
    return Manifest(**{**values, **changes})


def test_the_entry_point_is_bert() -> None:
    assert workload_class("bert") is Bert


def test_the_defaults_are_bert_base() -> None:
    model = Bert(name="bert")
    assert (model.num_layers, model.hidden_size, model.num_heads) == (12, 768, 12)
    assert model.problems(manifest()) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": 128, "num_heads": 3}, "num_heads (3) must divide hidden_size (128)"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"mask_probability": 0}, "mask_probability"),
        ({"hiden_size": 8}, "hiden_size"),
    ],
)
def test_impossible_values_are_refused(values, message) -> None:
    with pytest.raises(ValidationError) as caught:
        Bert(**values)
    assert message in str(caught.value)
    assert caught.value.error_count() == 1


@pytest.mark.parametrize(
    ("workload", "changes", "expected"),
    [
        ({}, {"seq_len": 1024}, "workload.max_positions: 512, but"),
        ({"next_sentence": True}, {}, "workload.next_sentence: true, but"),
        ({}, {"vocabulary": Vocabulary(
            size=9, pad_id=0, mask_id=None, special_ids=(0,), continuation_ids=()
        )}, "mask token"),
        ({}, {"vocabulary": Vocabulary(
            size=2, pad_id=0, mask_id=1, special_ids=(0, 1), continuation_ids=()
        )}, "special ids only"),
    ],
)  # fmt: skip
def test_unfit_data_sets_are_refused_in_one_line(workload, changes, expected) -> None:
    (line,) = Bert(**workload).problems(manifest(**changes))
    assert expected in line


def test_data_made_for_a_gpt_is_told() -> None:
    assert Bert().advice(manifest()) == Bert().advice(manifest(packing="best_fit")) == []
    config = TokenizerConfig(train="bpe", vocab_size=300)
    vocabulary = train_tokenizer(["a few words of text"], config, seq_len=32).vocabulary()
    assert Bert().problems(manifest(vocabulary=vocabulary)) == []
    frame, cut = Bert().advice(manifest(vocabulary=vocabulary, packing="concat"))
    assert frame.startswith("its tokenizer has no [CLS] and [SEP], as for a gpt")
    assert cut.startswith("packing: concat cuts its documents anywhere, as for a gpt")


@pytest.mark.parametrize("next_sentence", [False, True])
def test_an_evaluation_reports_what_the_recipe_may_name(
    next_sentence: bool, make_bert, make_rows, vocabulary
) -> None:
    bert = make_bert(next_sentence=next_sentence)
    model = bert.build_model(vocabulary, 64)
    rows = make_rows([9, 12, 30], pairs=next_sentence)
    found = evaluate(WholeModel(model, bert), bert, [rows], vocabulary, torch.device("cpu"))
    reported = [f"eval/{term}_loss" for term in found.terms]
    reported += [f"eval/{name}" for name in found.metrics]
    assert sorted(evaluation_metrics(bert)) == sorted(["eval/loss", *reported])


def test_reading_a_recipe_imports_neither_transformers_nor_torchs_compiler() -> None:
    code = "import sys, elastrata_workloads.bert; print(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True
    )
    assert not {"transformers", "torch._dynamo"} & set(run.stdout.split())
