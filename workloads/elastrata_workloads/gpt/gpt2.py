"""GPT-2 as transformers has it: its configuration and its weights, to and from ours."""

from __future__ import annotations

from typing import Any

from elastrata.core.counterpart import Counterpart, Origin
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded.origins import in_blocks, of_parameters

ARCHITECTURE, CONFIG = "GPT2LMHeadModel", "GPT2Config"

_TOKENS, _HEAD = "transformer.wte.weight", "lm_head.weight"

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
        "qk_norm: true": shape.qk_norm,
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
    """The settings of the workload `gpt` for a GPT2Config, which does not say whether all of its
    biases are zeros."""
    return {
        "hidden_size": config.n_embd,
        "num_layers": config.n_layer,
        "num_heads": config.n_head,
        "num_kv_heads": config.n_head,
        "intermediate_size": config.n_inner or 4 * config.n_embd,
        "max_positions": config.n_positions,
        "positions": "learned",
        "activation": "gelu",
        "norm": "layer",
        "norm_eps": config.layer_norm_epsilon,
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


def counterpart(shape: GptShape) -> Counterpart:
    """Where our parameters lie in it.

    GPT-2 keeps its matrices transposed, query, key and value as one, and always has biases: zeros
    where ours has none.
    """
    origins = {
        "embeddings.tokens.weight": Origin(name=_TOKENS),
        "embeddings.positions.weight": Origin(name="transformer.wpe.weight"),
    }
    if not shape.tied_embeddings:
        origins["head.weight"] = Origin(name=_HEAD)
    modules = {"norm": Origin(name="transformer.ln_f")}
    modules |= in_blocks(shape.num_layers, "blocks", "transformer.h", _of_block())
    return Counterpart(
        origins=origins | of_parameters(modules),
        tied={_HEAD: _TOKENS} if shape.tied_embeddings else {},
        fills_with_zeros=True,
        prefix="transformer.",
        unused=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
    )


def _of_block() -> dict[str, Origin]:
    """The modules of a block."""
    projections = {
        f"attention.{name}": Origin(
            name="attn.c_attn", transposed=True, part=number, parts=len(_QKV)
        )
        for number, name in enumerate(_QKV)
    }
    others = {
        name: Origin(name=theirs, transposed=not theirs.startswith("ln"))
        for name, theirs in _BLOCK.items()
    }
    return projections | others
