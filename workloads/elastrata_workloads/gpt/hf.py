"""GPT in the formats of transformers: configurations, parameter names and folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.workload.hf_folder import WeightForm
from elastrata.workload.hf_mapping import Counterpart, Origin
from elastrata_pipelines.errors import UserError
from elastrata_workloads.gpt.shape import Bias, GptShape
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

    label, architecture, config_class = "GPT-2", "GPT2LMHeadModel", "GPT2Config"

    @staticmethod
    def differences(shape: GptShape) -> list[str]:
        """Return the recipe keys whose values GPT-2 does not support; empty if it fits."""
        differs_in = {
            "positions: rotary": shape.positions != "learned",
            "activation: swiglu": shape.activation != "gelu",
            "norm: rms": shape.norm != "layer",
            "qk_norm: true": shape.qk_norm,
            "num_kv_heads": shape.num_kv_heads != shape.num_heads,
            "head_size": shape.head_size * shape.num_heads != shape.hidden_size,
            "window": shape.window is not None,
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
            **_quantization(config),
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


_QK_NORMS = {
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
}
"""Names of the block modules that only some families have."""
_SAME = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
"""Keys with the same values: ours and Llama's."""
_STYLE = {"positions": "rotary", "activation": "swiglu", "norm": "rms"}
"""Our keys whose value is the same in all families but GPT-2."""
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
"""Keys of Llama 3.1's rotary scaling: ours and Llama's."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", *_SCALING.values()}


@dataclass(frozen=True, kw_only=True)
class LlamaLike:
    """A format with our tensors under Llama's names."""

    label: str
    """Name for users."""
    architecture: str
    config_class: str
    biases: Mapping[Bias, Mapping[str, bool]]
    """Values of `bias` that it supports, with those of its own keys."""
    qk_norm: bool = False
    """Whether it has a norm for every head's query and key."""
    has_head_dim: bool = True
    """Whether it has heads of any size."""
    has_window: bool = False
    """Whether all its blocks attend within a window."""

    def differences(self, shape: GptShape) -> list[str]:
        """Return the recipe keys whose values it does not support; empty if it fits."""
        differs_in = {
            "positions: learned": shape.positions != "rotary",
            "activation: gelu": shape.activation != "swiglu",
            "norm: layer": shape.norm != "rms",
            f"qk_norm: {str(shape.qk_norm).lower()}": shape.qk_norm != self.qk_norm,
            f"bias: {str(shape.bias).lower()}": shape.bias not in self.biases,
            "head_size": not self.has_head_dim
            and shape.head_size * shape.num_heads != shape.hidden_size,
            "window": not self.has_window and shape.window is not None,
        }
        return [key for key, differs in differs_in.items() if differs]

    def to_config(self, shape: GptShape) -> dict[str, Any]:
        """Return the arguments of its configuration class in transformers."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rotary_base}
        if scaling := shape.rotary_scaling:
            rope["rope_type"] = "llama3"
            rope |= {theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()}
        return {
            "vocab_size": shape.num_ids,
            **{theirs: getattr(shape, ours) for ours, theirs in _SAME.items()},
            "hidden_act": "silu",
            "rope_parameters": rope,
            **self.biases[shape.bias if shape.bias in self.biases else "attention"],
            # Defaults of some classes are 128, whatever the hidden size, and a window of 4,096.
            **({"head_dim": shape.head_size} if self.has_head_dim else {}),
            **({"sliding_window": shape.window} if self.has_window else {}),
        }

    def from_config(self, config: Any) -> dict[str, Any]:
        """Return the settings of the workload `gpt` for its configuration."""
        rope = config.rope_parameters
        is_scaled = rope["rope_type"] == "llama3"
        scaling = {ours: rope[theirs] for ours, theirs in _SCALING.items()} if is_scaled else None
        return {
            **{ours: getattr(config, theirs) for ours, theirs in _SAME.items()},
            **_STYLE,
            "rotary_base": rope["rope_theta"],
            "rotary_scaling": scaling,
            "head_size": _own_head_size(config),
            "window": config.sliding_window if self.has_window else None,
            "bias": self._bias(config),
            "qk_norm": self.qk_norm,
        }

    def _bias(self, config: Any) -> Bias | None:
        return next((bias for bias, keys in self.biases.items() if _has(config, keys)), None)

    def unsupported(self, config: Any) -> list[str]:
        """Return the parts of its configuration that our model lacks; empty if it has all."""
        rope = {key: value for key, value in config.rope_parameters.items() if value is not None}
        rope_type = rope["rope_type"]
        kinds = {*(getattr(config, "layer_types", None) or ())}
        missing_by_part = {
            f"hidden_act {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
            f"rope_type {rope_type}": rope_type not in ("default", "llama3"),
            f"head_dim {_own_head_size(config)}": not self.has_head_dim
            and _own_head_size(config) is not None,
            " with ".join(
                f"{key} {str(getattr(config, key, False)).lower()}"
                for key in ("attention_bias", "mlp_bias")
                if hasattr(config, key)
            ): self._bias(config) is None,
            "use_sliding_window": len(kinds) > 1
            or (not self.has_window and "sliding_attention" in kinds),
            **_quantization(config),
        }
        # With an unknown type all its keys are, too.
        keys = rope.keys() - _ROPE_KEYS if rope_type in ("default", "llama3") else ()
        missing_by_part |= {
            f"rope_parameters.{key} {rope[key]}": (key, rope[key]) != ("partial_rotary_factor", 1.0)
            for key in sorted(keys)
        }
        return [key for key, differs in missing_by_part.items() if differs]

    def counterpart(self, shape: GptShape) -> Counterpart:
        """Return the mapping of our parameters to its own: the same tensors under other names."""
        outside = {name: Origin(name=theirs) for name, theirs in _LLAMA_OUTSIDE.items()}
        if shape.tied_embeddings:
            del outside["head"]
        names = {**_LLAMA_BLOCK, **(_QK_NORMS if self.qk_norm else {})}
        block = {name: Origin(name=theirs) for name, theirs in names.items()}
        modules = outside | repeat_in_blocks(shape.num_layers, "blocks", "model.layers", block)
        tied = {"lm_head.weight": "model.embed_tokens.weight"}
        origins = parameter_origins(modules)
        has_more = shape.bias not in self.biases
        if has_more:  # see `export`
            biases = ("query.bias", "key.bias", "value.bias", "attention.output.bias")
            origins = {n: o for n, o in origins.items() if n.endswith((".weight", *biases))}
        return Counterpart(
            origins=origins,
            fills_with_zeros=has_more,
            tied=tied if shape.tied_embeddings else {},
            prefix="model.",
            # A constant that older versions of transformers saved as a buffer.
            unused=(r".*\.rotary_emb\.inv_freq",),
        )


def _own_head_size(config: Any) -> int | None:
    """Return the size of a head if it is not the usual part of the hidden size."""
    size: int | None = getattr(config, "head_dim", None)
    is_usual = size is None or size * config.num_attention_heads == config.hidden_size
    return None if is_usual else size


def _has(config: Any, keys: Mapping[str, bool]) -> bool:
    return all(getattr(config, key, False) == value for key, value in keys.items())


def _quantization(config: Any) -> dict[str, bool]:
    return {"quantization_config": getattr(config, "quantization_config", None) is not None}


Family = Gpt2 | LlamaLike

FAMILIES: Mapping[str, Family] = {
    "gpt2": Gpt2(),
    # Also SmolLM2.
    "llama": LlamaLike(
        label="Llama",
        architecture="LlamaForCausalLM",
        config_class="LlamaConfig",
        biases={
            False: {"attention_bias": False, "mlp_bias": False},
            True: {"attention_bias": True, "mlp_bias": True},
            "attention": {"attention_bias": True, "mlp_bias": False},
        },
    ),
    # Also Qwen2.5.
    "qwen2": LlamaLike(
        label="Qwen2",
        architecture="Qwen2ForCausalLM",
        config_class="Qwen2Config",
        biases={"qkv": {}},
        has_head_dim=False,
    ),
    "qwen3": LlamaLike(
        label="Qwen3",
        architecture="Qwen3ForCausalLM",
        config_class="Qwen3Config",
        biases={False: {"attention_bias": False}, "attention": {"attention_bias": True}},
        qk_norm=True,
    ),
    "mistral": LlamaLike(
        label="Mistral",
        architecture="MistralForCausalLM",
        config_class="MistralConfig",
        biases={False: {}},
        has_window=True,
    ),
}
"""Families by transformers' `model_type`; an export is one of the first that has the model."""


def family_of(shape: GptShape) -> Family:
    """Return the family, one of `FAMILIES`, whose models can have this shape.

    Raises:
        UserError: no family can.
    """
    differences = [(family, family.differences(shape)) for family in FAMILIES.values()]
    for family, keys in differences:
        if not keys:
            return family
    text = "; ".join(f"{family.label} without {', '.join(keys)}" for family, keys in differences)
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
    if tokenizer is not None and shape.bias == "qkv" and not _is_tokenizer_of_qwen(tokenizer):
        # Whatever a folder's files say, transformers loads Qwen2's own tokenizer with a Qwen2. A
        # Llama whose output has a bias of zeros computes the same.
        family = FAMILIES["llama"]
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


def _is_tokenizer_of_qwen(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "Qwen2" in str(config.get("tokenizer_class"))
