"""Exported folders in the hands of transformers, and folders of transformers in ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Vocabulary
from elastrata_workloads.gpt import from_transformers

# fp32 sums taken in another order: a few units in the last place of logits of size about 1.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"bos_token_id": 0, "eos_token_id": 0, "n_positions": 64, **SIZES}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, **SIZES}
# Samples of 64 tokens are slowed in part of their pairs, as those of 128,000 tokens of Llama 3.1.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Further keys of the configuration of SmolLM2-135M, which mean nothing.
SMOL = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}
LENGTHS = (64, 17, 8, 2)


@pytest.fixture
def tokenizer_folder(tmp_path: Path, vocabulary) -> Path:
    words = ["<end>", *(f"w{i}" for i in range(1, vocabulary.size))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>"
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("style", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"embedding_multiple": 64}),
        ("gpt2", {"bias": False, "tied_embeddings": False, "embedding_multiple": 64}),
        ("llama", {"embedding_multiple": 64}),
        ("llama", {"tied_embeddings": True, "bias": True, "rotary_base": 500.0}),
        ("llama", {"qk_norm": True, "embedding_multiple": 64, "z_loss": 1e-4}),
        ("llama", {"qk_norm": True, "tied_embeddings": True}),
        ("llama", {"qk_norm": True, "head_size": 24, "bias": "attention"}),
        ("llama", {"bias": "qkv", "tied_embeddings": True}),
        ("llama", {"window": 9, "embedding_multiple": 64}),
        ("llama", {"rotary_scaling": {"factor": 4.0, "original_max_positions": 20}}),
    ],
)
def test_export_loads_whole_and_gives_equal_logits(
    make_gpt, make_rows, vocabulary, tokenizer_folder, tmp_path, style, changes
) -> None:
    gpt = make_gpt(style, **changes)
    model = gpt.build_model(vocabulary, 64)
    with torch.no_grad():  # norms and biases as they are after training
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    gpt.export(model.state_dict(), vocabulary, 64, tokenizer_folder, tmp_path / "model")
    loaded, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 0
    assert loaded.config.architectures == [type(loaded).__name__]
    assert (type(loaded).__name__ == "Qwen3ForCausalLM") == gpt.qk_norm
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w3 w4")["input_ids"] == [3, 4]

    batch = gpt.collate(make_rows([64]), vocabulary, seed=0)
    theirs = loaded.eval()(batch.input_ids[None]).logits[0, batch.predicted]
    ours = model.eval()(batch)[:, : vocabulary.size]
    torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize(
    "other",
    [
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
        lambda: GPT2LMHeadModel(GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False)),
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
        lambda: LlamaForCausalLM(
            LlamaConfig(
                **LLAMA,
                attention_bias=True,
                mlp_bias=True,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            )
        ),
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, attention_bias=True, head_dim=16)),
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=LLAMA3)),
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, **SMOL)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=8)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=16, attention_bias=True)),
        lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=8)),
        lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=40, head_dim=12)),
        lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=None)),
    ],
    ids=[
        *("gpt2", "gpt2 untied", "llama", "llama with biases", "llama with biases in attention"),
        *("llama 3.1", "smollm2", "qwen2.5", "qwen2.5 tied", "qwen3", "qwen3 of wide heads"),
        *("mistral in blocks", "mistral in one block", "mistral without a window"),
    ],
)
def test_import_gives_equal_logits_and_exports_the_same(
    make_rows, vocabulary, tmp_path, other
) -> None:
    theirs = other().eval()
    with torch.no_grad():  # biases and norms as they are after training
        for parameter in theirs.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    gpt, state = from_transformers(tmp_path / "theirs")
    model = gpt.build_model(vocabulary, 64)
    model.load_state_dict(state)
    for lengths in [[length] for length in LENGTHS]:
        batch = gpt.collate(make_rows(lengths), vocabulary, seed=0)
        expected = theirs(batch.input_ids[None]).logits[0, batch.predicted]
        torch.testing.assert_close(model.eval()(batch), expected, **CLOSE)

    gpt.export(model.state_dict(), vocabulary, 64, None, tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"head_size": 7}, "head_size (7) must be even with rotary positions"),
        ({"positions": "learned"}, "rotary_scaling needs positions: rotary"),
        (
            {"rotary_scaling": {"factor": 2, "original_max_positions": 8, "low_freq_factor": 4}},
            "high_freq_factor (4) must be above low_freq_factor (4)",
        ),
        ({"rotary_scaling": {"factor": 2}}, "original_max_positions"),
        ({"bias": "q"}, "bias"),
        ({"window": 1}, "window"),
    ],
)
def test_keys_of_families_are_checked(make_gpt, changes, line) -> None:
    scaling = {"factor": 8.0, "original_max_positions": 16}
    with pytest.raises(ValidationError) as caught:
        make_gpt("llama", **{"rotary_scaling": scaling, **changes})
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (GPT2Config(**GPT2, activation_function="relu"), "has no activation_function relu"),
        (GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse"),
        (LlamaConfig(**LLAMA, mlp_bias=True), "no attention_bias false with mlp_bias true$"),
        (Qwen2Config(**LLAMA, head_dim=16), "has no head_dim 16$"),
        (
            Qwen3Config(**LLAMA, head_dim=8, use_sliding_window=True, max_window_layers=1),
            "has no use_sliding_window$",
        ),
        (
            LlamaConfig(**LLAMA, rope_parameters={**LLAMA3, "partial_rotary_factor": 0.5}),
            r"has no rope_parameters.partial_rotary_factor 0.5$",
        ),
        (
            LlamaConfig(**LLAMA, rope_parameters={"rope_type": "yarn", "factor": 2.0}),
            "has no rope_type yarn$",
        ),
        (MistralConfig(**LLAMA, hidden_act="relu"), "has no hidden_act relu$"),
        (
            MistralConfig(**LLAMA, quantization_config={"quant_method": "fp8"}),
            "has no quantization_config$",
        ),
        (
            LlamaConfig(**LLAMA, rope_parameters={"rope_type": "linear", "factor": 2.0}),
            "has no rope_type linear",
        ),
    ],
)
def test_models_with_other_parts_are_refused(tmp_path, config, line) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=line):
        from_transformers(tmp_path)


def test_another_kind_of_model_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(UserError, match="a bert: expected gpt2, llama, qwen2, qwen3, mistral"):
        from_transformers(tmp_path)


def test_what_transformers_does_not_have_is_not_exported(make_gpt, tmp_path) -> None:
    gpt = make_gpt("mixed")
    vocabulary = Vocabulary(size=97, pad_id=0, mask_id=None, special_ids=(), continuation_ids=())
    with pytest.raises(UserError) as caught:
        gpt.export({}, vocabulary, 64, None, tmp_path / "model")
    assert str(caught.value) == (
        "workload: transformers has no such model: GPT-2 without norm: rms, num_kv_heads; "
        "Llama without positions: learned, activation: gelu; "
        "Qwen2 without positions: learned, activation: gelu, bias: false; "
        "Qwen3 without positions: learned, activation: gelu, qk_norm: false; "
        "Mistral without positions: learned, activation: gelu"
    )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("style", "changes", "line"),
    [
        ("gpt2", {}, "GPT-2 without qk_norm: true"),
        ("llama", {"bias": True}, "Llama without qk_norm: true; .*; Qwen3 without bias: true"),
    ],
)
def test_normalised_queries_that_transformers_does_not_have_are_refused(
    make_gpt, vocabulary, tmp_path, style, changes, line
) -> None:
    gpt = make_gpt(style, qk_norm=True, **changes)
    with pytest.raises(UserError, match=line):
        gpt.export({}, vocabulary, 64, None, tmp_path / "model")
    assert not (tmp_path / "model").exists()
