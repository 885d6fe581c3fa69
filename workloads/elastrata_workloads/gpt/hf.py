"""GPT in the formats of transformers: configurations, parameter names and folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from elastrata.workload.hf_folder import WeightForm
from elastrata.workload.hf_mapping import Counterpart, Origin
from elastrata_pipelines.errors import UserError
from elastrata_workloads.gpt.shape import GptShape
from elastrata_workloads.unpadded import hf
from elastrata_workloads.unpadded.hf import IdRows, parameter_origins, repeat_in_blocks

_GPT2_TOKENS, _GPT2_HEAD = "transformer.wte.weight", "lm_head.weight"
_GPT2_QKV = ("query", "key", "value")
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.output": "attn.c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.down": "mlp.c_proj",
}
"""Names of a block's modules: our name and GPT-2's."""


class Gpt2:
    """GPT-2's format: transposed matrices, and a single matrix for query, key and value."""

    architecture, config_class = "GPT2LMHeadModel", "GPT2Config"

    @staticmethod
    def differences(shape: GptShape) -> list[str]:
        """Return the recipe keys whose values GPT-2 does not support; empty if it fits."""
        differs_in = {
            "positions: rotary": shape.positions != "learned",
            "activation: swiglu": shape.activation != "gelu",
            "norm: rms": shape.norm != "layer",
            "qk_norm: true": shape.qk_norm,
            "num_kv_heads": shape.num_kv_heads != shape.num_heads,
        }
        return [key for key, differs in differs_in.items() if differs]

    @staticmethod
    def to_config(shape: GptShape) -> dict[str, Any]:
        """Return the arguments of transformers' GPT2Config."""
        return {
            "vocab_size": shape.num_ids,
            "n_positions": shape.max_positions,
            "n_embd": shape.hidden_size,
            "n_layer": shape.num_layers,
            "n_head": shape.num_heads,
            "n_inner": shape.intermediate_size,
            # transformers' name of the tanh approximation.
            "activation_function": "gelu_new",
            "layer_norm_epsilon": shape.norm_eps,
            "initializer_range": shape.initializer_range,
            "resid_pdrop": shape.dropout,
            "embd_pdrop": shape.dropout,
            # Attention weights are never dropped: the varlen kernel has no dropout.
            "attn_pdrop": 0.0,
            "tie_word_embeddings": shape.tied_embeddings,
        }

    @staticmethod
    def from_config(config: Any) -> dict[str, Any]:
        """Return the settings of the workload `gpt` for a GPT2Config.

        `bias` is left at its default: a GPT2Config does not say whether all biases are zero.
        """
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

    @staticmethod
    def unsupported(config: Any) -> list[str]:
        """Return the parts of a GPT2Config that our model lacks; empty if it has all."""
        missing_by_part = {
            f"activation_function {config.activation_function}": config.activation_function
            not in ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights false": not config.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
            "add_cross_attention": config.add_cross_attention,
        }
        return [key for key, differs in missing_by_part.items() if differs]

    @staticmethod
    def counterpart(shape: GptShape) -> Counterpart:
        """Return the mapping of our parameters to GPT-2's.

        GPT-2's matrices are transposed, and query, key and value form one matrix. GPT-2 always has
        biases: they are zeros if our model has none.
        """
        origins = {
            "embeddings.tokens.weight": Origin(name=_GPT2_TOKENS),
            "embeddings.positions.weight": Origin(name="transformer.wpe.weight"),
        }
        if not shape.tied_embeddings:
            origins["head.weight"] = Origin(name=_GPT2_HEAD)
        modules = {"norm": Origin(name="transformer.ln_f")}
        modules |= repeat_in_blocks(shape.num_layers, "blocks", "transformer.h", _gpt2_block())
        return Counterpart(
            origins=origins | parameter_origins(modules),
            tied={_GPT2_HEAD: _GPT2_TOKENS} if shape.tied_embeddings else {},
            fills_with_zeros=True,
            prefix="transformer.",
            # Causal masks that older versions of transformers saved as buffers.
            unused=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        )


def _gpt2_block() -> dict[str, Origin]:
    """Return the origins of a block's modules."""
    projections = {
        f"attention.{name}": Origin(
            # GPT-2's `Conv1D` stores matrices as [inputs, outputs].
            name="attn.c_attn",
            transposed=True,
            part=number,
            parts=len(_GPT2_QKV),
        )
        for number, name in enumerate(_GPT2_QKV)
    }
    other_modules = {
        name: Origin(name=theirs, transposed=not theirs.startswith("ln"))
        for name, theirs in _GPT2_BLOCK.items()
    }
    return projections | other_modules


_LLAMA_OUTSIDE = {
    "embeddings.tokens": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
}
_LLAMA_BLOCK = {
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
"""Names of a block's modules: our name and Llama's."""


class Llama:
    """Llama's format: our tensors under other names."""

    architecture, config_class = "LlamaForCausalLM", "LlamaConfig"

    @staticmethod
    def differences(shape: GptShape) -> list[str]:
        """Return the recipe keys whose values Llama does not support; empty if it fits."""
        differs_in = {
            "positions: learned": shape.positions != "rotary",
            "activation: gelu": shape.activation != "swiglu",
            "norm: layer": shape.norm != "rms",
            "qk_norm: true": shape.qk_norm,
        }
        return [key for key, differs in differs_in.items() if differs]

    @staticmethod
    def to_config(shape: GptShape) -> dict[str, Any]:
        """Return the arguments of transformers' LlamaConfig."""
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

    @staticmethod
    def from_config(config: Any) -> dict[str, Any]:
        """Return the settings of the workload `gpt` for a LlamaConfig."""
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

    @staticmethod
    def unsupported(config: Any) -> list[str]:
        """Return the parts of a LlamaConfig that our model lacks; empty if it has all."""
        rope_type = config.rope_parameters["rope_type"]
        missing_by_part = {
            f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
            f"rope_type {rope_type}": rope_type != "default",
            f"head_dim {config.head_dim}": config.head_dim * config.num_attention_heads
            != config.hidden_size,
            "attention_bias unlike mlp_bias": config.attention_bias
            != getattr(config, "mlp_bias", False),
        }
        return [key for key, differs in missing_by_part.items() if differs]

    @staticmethod
    def counterpart(shape: GptShape, more: Mapping[str, str] = MappingProxyType({})) -> Counterpart:
        """Return the mapping of our parameters to Llama's: the same tensors under other names."""
        outside = {name: Origin(name=theirs) for name, theirs in _LLAMA_OUTSIDE.items()}
        if shape.tied_embeddings:
            del outside["head"]
        block = {name: Origin(name=theirs) for name, theirs in {**_LLAMA_BLOCK, **more}.items()}
        modules = outside | repeat_in_blocks(shape.num_layers, "blocks", "model.layers", block)
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        return Counterpart(
            origins=parameter_origins(modules),
            tied=tied if shape.tied_embeddings else {},
            prefix="model.",
            # A constant that older versions of transformers saved as a buffer.
            unused=(r".*\.rotary_emb\.inv_freq",),
        )


_QWEN3_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
"""Names of the block modules that Llama lacks: our name and Qwen3's."""


class Qwen3(Llama):
    """Qwen3's format (Yang et al. 2025, arXiv 2505.09388).

    Qwen3 is a Llama without biases, with a norm for every head's query and key.
    """

    architecture, config_class = "Qwen3ForCausalLM", "Qwen3Config"

    @staticmethod
    def differences(shape: GptShape) -> list[str]:
        """Return the recipe keys whose values Qwen3 does not support; empty if it fits."""
        without_norms = [key for key in Llama.differences(shape) if not key.startswith("qk_norm")]
        own_differences = {"qk_norm: false": not shape.qk_norm, "bias: true": shape.bias}
        return [*without_norms, *(key for key, differs in own_differences.items() if differs)]

    @staticmethod
    def to_config(shape: GptShape) -> dict[str, Any]:
        """Return the arguments of transformers' Qwen3Config."""
        values = Llama.to_config(shape)
        del values["mlp_bias"]
        # Qwen3Config's default for `head_dim` is 128, whatever the hidden size.
        return {**values, "head_dim": shape.head_size}

    @staticmethod
    def from_config(config: Any) -> dict[str, Any]:
        """Return the settings of the workload `gpt` for a Qwen3Config."""
        return {**Llama.from_config(config), "qk_norm": True}

    @staticmethod
    def unsupported(config: Any) -> list[str]:
        """Return the parts of a Qwen3Config that our model lacks; empty if it has all."""
        missing_parts = Llama.unsupported(config)
        return (
            [*missing_parts, "use_sliding_window"] if config.use_sliding_window else missing_parts
        )

    @staticmethod
    def counterpart(
        shape: GptShape, more: Mapping[str, str] = MappingProxyType(_QWEN3_NORMS)
    ) -> Counterpart:
        """Return the mapping of our parameters to Qwen3's: the same tensors under other names."""
        return Llama.counterpart(shape, more)


Family = type[Gpt2] | type[Llama]

FAMILIES: Mapping[str, Family] = {"gpt2": Gpt2, "llama": Llama, "qwen3": Qwen3}
"""Families by transformers' `model_type`."""
_DISPLAY_NAMES: Mapping[str, Family] = {"GPT-2": Gpt2, "Llama": Llama, "Qwen3": Qwen3}


def family_of(shape: GptShape) -> Family:
    """Return the family, one of `FAMILIES`, whose models can have this shape.

    Raises:
        UserError: no family can.
    """
    by_family: dict[Family, list[str]] = {
        family: family.differences(shape) for family in FAMILIES.values()
    }
    for family, differences in by_family.items():
        if not differences:
            return family
    text = "; ".join(
        f"{name} without {', '.join(by_family[family])}" for name, family in _DISPLAY_NAMES.items()
    )
    raise UserError(f"workload: transformers has no such model: {text}")


# Tables that may have rows without an id, see `embedding_multiple`; the export omits them.
_ROWS_PER_ID = ("embeddings.tokens.weight", "head.weight")
_SPECIAL = ("bos_token_id", "eos_token_id")


def export(
    shape: GptShape,
    state: Mapping[str, Tensor],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
) -> None:
    """Write config.json, generation_config.json, the weights and the tokenizer's files.

    A tied head is not in the file: transformers ties it to the token embedding, as this model does.

    Raises:
        UserError: transformers has no model of this shape.
    """
    family = family_of(shape)
    weights = family.counterpart(shape).to_theirs(IdRows(state, _ROWS_PER_ID, shape.num_ids))
    hf.export(
        family.config_class,
        family.architecture,
        family.to_config(shape),
        weights,
        tokenizer,
        path,
        form,
        special=_SPECIAL,
        generates=True,
    )
