"""What the engine and its users are told."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from elastrata.device.capabilities import DeviceCapabilities
from elastrata.step.evaluate import evaluate, evaluation_metrics
from elastrata.step.forward_backward import WholeModel
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_workloads.gpt import Gpt
from support.synthetic import fields_of


@pytest.fixture
def manifest(vocabulary) -> Manifest:
    return Manifest(
        samples=1,
        tokens=2,
        stripes=1,
        stripe_size=1,
        seq_len=1024,
        seed=0,
        packing="concat",
        pairs=False,
        token_dtype="uint16",
        length_histogram=(0, 0, 1),
        vocabulary=vocabulary,
        tokenizer_fingerprint="",
        sources=(),
        files=(),
    )


@pytest.mark.parametrize(("kind", "lines"), [("bpe", 0), ("wordpiece", 1)])
def test_a_tokenizer_made_for_bert_is_told_and_our_own_for_gpt_is_not(
    kind: Literal["bpe", "wordpiece"], lines: int, manifest: Manifest
) -> None:
    config = TokenizerConfig(train=kind, vocab_size=300)
    files = train_tokenizer(["a few words of text"], config, seq_len=32)
    trained = manifest.model_copy(update={"vocabulary": files.vocabulary()})
    assert len(Gpt().advice(trained)) == lines


def test_the_defaults_are_gpt2_of_124_million(manifest) -> None:
    gpt = Gpt(name="gpt")
    assert gpt.problems(manifest) == []
    shape = gpt.shape(50257)
    assert (shape.num_kv_heads, shape.intermediate_size, shape.head_size) == (12, 3072, 64)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"hidden_size": 128, "num_heads": 3},
            "num_heads (3) must divide hidden_size (128); the nearest divisor is 2",
        ),
        (
            {"hidden_size": 128, "num_heads": 8, "num_kv_heads": 3},
            "num_kv_heads (3) must divide num_heads (8); the nearest divisor is 2",
        ),
        (
            {"hidden_size": 36, "num_heads": 12, "positions": "rotary"},
            "hidden_size / num_heads (3) must be even with rotary positions",
        ),
        ({"hidden_size": 0}, "hidden_size"),
        ({"positions": "sinusoidal"}, "'learned' or 'rotary'"),
        ({"activation": "relu"}, "'gelu' or 'swiglu'"),
        ({"norm": "batch"}, "'layer' or 'rms'"),
        ({"dropout": 1.0}, "dropout"),
        ({"hiden_size": 8}, "hiden_size"),
    ],
)
def test_impossible_values_are_refused(values, message) -> None:
    with pytest.raises(ValidationError) as caught:
        Gpt(**values)
    assert message in str(caught.value)
    assert caught.value.error_count() == 1


def test_unfit_data_sets_are_refused_in_one_line(manifest) -> None:
    longer = Manifest(**{**fields_of(manifest), "seq_len": 1025})
    (line,) = Gpt().problems(longer)
    assert "workload.max_positions: 1024, but this data set has samples of up to 1,025" in line
    pairs = Manifest(**{**fields_of(manifest), "pairs": True})
    (line,) = Gpt().problems(pairs)
    assert "prepare it without pairs" in line


def test_a_kernel_that_is_not_there_is_told() -> None:
    cpu = DeviceCapabilities(
        device="this CPU", capability=None, has_bf16=True, missing_compiler=None
    )
    (line,) = Gpt(attention="varlen").substitutions(cpu, torch.bfloat16)
    assert line.startswith("workload.attention: varlen: unavailable for this CPU")
    assert Gpt().substitutions(cpu, torch.bfloat16) == []


def test_an_evaluation_reports_what_the_recipe_may_name(make_gpt, make_rows, vocabulary) -> None:
    gpt = make_gpt()
    model = gpt.build_model(vocabulary, 64)
    found = evaluate(
        WholeModel(model, gpt), gpt, [make_rows([9, 12, 30])], vocabulary, torch.device("cpu")
    )
    reported = [f"eval/{term}_loss" for term in found.terms]
    reported += [f"eval/{name}" for name in found.metrics]
    assert sorted(evaluation_metrics(gpt)) == sorted(["eval/loss", *reported])
