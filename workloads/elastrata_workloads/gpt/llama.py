"""Llama as transformers has it: its configuration and its weights, to and from ours."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from elastrata.core.counterpart import Counterpart, Origin
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.origins import in_blocks, of_parameters

ARCHITECTURE, CONFIG = "LlamaForCausalLM", "LlamaConfig"

_OUTSIDE = {
    "embeddings.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Names within a block: ours and theirs."""


def differences(shape: GptShape) -> list[str]:
    """Recipe keys with values that Llama cannot have; empty: the shape is a Llama."""
    differs_in = {
        "positions: learned": shape.positions != "rotary",
        "activation: gelu": shape.activation != "swiglu",
        "norm: layer": shape.norm != "rms",
        "qk_norm: true": shape.qk_norm,
    }
    return [key for key, differs in differs_in.items() if differs]


def to_config(shape: GptShape) -> dict[str, Any]:
    """The arguments of transformers' LlamaConfig."""
    return {
        "vocab_size": shape.num_ids,
        "max_position_embeddings": shape.max_positions,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rotary_base},
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": shape.tied_embeddings,
    }


def from_config(config: Any) -> dict[str, Any]:
    """The settings of the workload `gpt` for a LlamaConfig."""
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "positions": "rotary",
        "rotary_base": config.rope_parameters["rope_theta"],
        "activation": "swiglu",
        "norm": "rms",
        "norm_eps": config.rms_norm_eps,
        "bias": config.attention_bias,
        "tied_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }


def unsupported(config: Any) -> list[str]:
    """Parts that a LlamaConfig asks for and our model does not have; empty: it has all."""
    rope_type = config.rope_parameters["rope_type"]
    lacks = {
        f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        f"rope_type {rope_type}": rope_type != "default",
        f"head_dim {config.head_dim}": config.head_dim * config.num_attention_heads
        != config.hidden_size,
        "attention_bias unlike mlp_bias": config.attention_bias
        != getattr(config, "mlp_bias", False),
    }
    return [key for key, differs in lacks.items() if differs]


def counterpart(shape: GptShape, more: Mapping[str, str] = MappingProxyType({})) -> Counterpart:
    """Where our parameters lie in it: the same tensors under other names.

    Args:
        shape: the model's.
        more: names within a block, ours and theirs, that Llama has not.
    """
    outside = {name: Origin(name=theirs) for name, theirs in _OUTSIDE.items()}
    if shape.tied_embeddings:
        del outside["head"]
    block = {name: Origin(name=theirs) for name, theirs in {**_BLOCK, **more}.items()}
    modules = outside | in_blocks(shape.num_layers, "blocks", "model.layers", block)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    return Counterpart(
        origins=of_parameters(modules),
        tied=tied if shape.tied_embeddings else {},
        prefix="model.",
        unused=(r".*\.rotary_emb\.inv_freq",),
    )
