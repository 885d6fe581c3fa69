"""GPT-2 as transformers has it: its configuration and its weights, to and from ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elastrata_workloads.gpt.shape import GptShape

ARCHITECTURE = "GPT2LMHeadModel"

_QKV = ("query", "key", "value")
_BLOCK = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
"""Names within a block: ours and theirs."""


def differences(shape: GptShape) -> list[str]:
    """Recipe keys with values that GPT-2 cannot have; empty: the shape is a GPT-2."""
    differs_in = {
        "positions: rotary": shape.positions != "learned",
        "activation: swiglu": shape.activation != "gelu",
        "norm: rms": shape.norm != "layer",
        "num_kv_heads": shape.num_kv_heads != shape.num_heads,
    }
    return [key for key, differs in differs_in.items() if differs]


def to_config(shape: GptShape) -> dict[str, Any]:
    """The arguments of transformers' GPT2Config."""
    return {
        "vocab_size": shape.num_ids,
        "n_positions": shape.max_positions,
        "n_embd": shape.hidden_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": shape.intermediate_size,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
        "initializer_range": shape.initializer_range,
        "resid_pdrop": shape.dropout,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": shape.tied_embeddings,
    }


def from_config(config: Any) -> dict[str, Any]:
    """The settings of the workload `gpt` for a GPT2Config."""
    return {
        "hidden_size": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_positions": config.n_positions,
        "positions": "learned",
        "activation": "gelu",
        "norm": "layer",
        "norm_eps": config.layer_norm_epsilon,
        "bias": True,
        "tied_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
    }


def unsupported(config: Any) -> list[str]:
    """Parts that a GPT2Config asks for and our model does not have; empty: it has all."""
    lacks = {
        f"activation_function {config.activation_function}": config.activation_function
        not in ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights false": not config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "add_cross_attention": config.add_cross_attention,
    }
    return [key for key, differs in lacks.items() if differs]


def to_weights(shape: GptShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their state dict from ours.

    GPT-2 keeps its matrices transposed, query, key and value as one, and always has biases: zeros
    where ours has none.
    """
    ours = _with_biases(shape, state)
    theirs = {
        "transformer.wte.weight": ours["embeddings.tokens.weight"],
        "transformer.wpe.weight": ours["embeddings.positions.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
    }
    if not shape.tied_embeddings:
        theirs["lm_head.weight"] = ours["head.weight"]
    for layer in range(shape.num_layers):
        here, there = f"blocks.{layer}.", f"transformer.h.{layer}."
        for part in ("weight", "bias"):
            fused = torch.cat([ours[f"{here}attention.{name}.{part}"] for name in _QKV])
            theirs[f"{there}attn.c_attn.{part}"] = _turned(fused, "attn.c_attn")
            for name, their_name in _BLOCK.items():
                value = ours[f"{here}{name}.{part}"]
                theirs[f"{there}{their_name}.{part}"] = _turned(value, their_name)
    return theirs


def from_weights(shape: GptShape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict from theirs."""
    ours = {
        "embeddings.tokens.weight": weights["transformer.wte.weight"],
        "embeddings.positions.weight": weights["transformer.wpe.weight"],
        "norm.weight": weights["transformer.ln_f.weight"],
        "norm.bias": weights["transformer.ln_f.bias"],
    }
    if not shape.tied_embeddings:
        ours["head.weight"] = weights["lm_head.weight"]
    for layer in range(shape.num_layers):
        here, there = f"blocks.{layer}.", f"transformer.h.{layer}."
        for part in ("weight", "bias"):
            fused = _turned(weights[f"{there}attn.c_attn.{part}"], "attn.c_attn")
            for name, value in zip(_QKV, fused.chunk(3), strict=True):
                ours[f"{here}attention.{name}.{part}"] = value.contiguous()
            for name, their_name in _BLOCK.items():
                value = weights[f"{there}{their_name}.{part}"]
                ours[f"{here}{name}.{part}"] = _turned(value, their_name)
    return ours


def _turned(value: Tensor, their_name: str) -> Tensor:
    """A matrix between [outputs, inputs], ours, and [inputs, outputs], theirs."""
    is_matrix = value.ndim == 2 and not their_name.startswith("ln")
    return value.T.contiguous() if is_matrix else value


def _with_biases(shape: GptShape, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if shape.bias:
        return dict(state)
    missing = {
        f"{name.removesuffix('weight')}bias": value.new_zeros(value.shape[0])
        for name, value in state.items()
        if name.startswith(("blocks", "norm"))
    }
    return {**state, **missing}
