"""ModernBERT in the format of transformers: configuration, parameter names and folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.workload.hf_folder import WeightForm
from elastrata.workload.hf_mapping import Counterpart, Origin
from elastrata_workloads.modernbert.shape import ModernBertShape
from elastrata_workloads.unpadded import hf
from elastrata_workloads.unpadded.hf import IdRows, parameter_origins, repeat_in_blocks

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_TOKENS = "model.embeddings.tok_embeddings"
_OUTSIDE = {
    "embeddings.tokens": Origin(name=_TOKENS),
    "embeddings.norm": Origin(name="model.embeddings.norm"),
    "norm": Origin(name="model.final_norm"),
    "head.dense": Origin(name="head.dense"),
    "head.norm": Origin(name="head.norm"),
}
_BLOCK = {
    "attention_norm": Origin(name="attn_norm"),
    "attention.query": Origin(name="attn.Wqkv", part=0, parts=3),
    "attention.key": Origin(name="attn.Wqkv", part=1, parts=3),
    "attention.value": Origin(name="attn.Wqkv", part=2, parts=3),
    "attention.output": Origin(name="attn.Wo"),
    "feed_forward_norm": Origin(name="mlp_norm"),
    "feed_forward.gate": Origin(name="mlp.Wi", part=0, parts=2),
    "feed_forward.up": Origin(name="mlp.Wi", part=1, parts=2),
    "feed_forward.down": Origin(name="mlp.Wo"),
}
"""Origins of a block's modules in ModernBERT's."""


def to_config(shape: ModernBertShape) -> dict[str, Any]:
    """Return the arguments of transformers' ModernBertConfig, without special ids."""
    return {
        "vocab_size": shape.num_ids,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_positions,
        "layer_types": _layer_types(shape.num_layers, shape.global_every),
        "local_attention": shape.window,
        "rope_parameters": {
            _GLOBAL: {"rope_type": "default", "rope_theta": shape.global_rotary_base},
            _LOCAL: {"rope_type": "default", "rope_theta": shape.local_rotary_base},
        },
        "norm_eps": shape.norm_eps,
        "initializer_range": shape.initializer_range,
        "pad_token_id": shape.pad_id,
        "tie_word_embeddings": True,
    }


def from_config(config: Any) -> dict[str, Any]:
    """Return the settings of the workload `modernbert` for a ModernBertConfig."""
    bases = config.rope_parameters
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "window": config.local_attention,
        "global_every": _global_every(config.layer_types),
        "global_rotary_base": bases[_GLOBAL]["rope_theta"],
        "local_rotary_base": bases[_LOCAL]["rope_theta"],
        "norm_eps": config.norm_eps,
        "initializer_range": config.initializer_range,
    }


def find_unsupported(config: Any) -> list[str]:
    """Return the parts of a ModernBertConfig that our model lacks; empty if it has all."""
    types, bases = config.layer_types, config.rope_parameters
    missing_by_part = {
        f"hidden_activation {config.hidden_activation}": config.hidden_activation != "gelu",
        f"classifier_activation {config.classifier_activation}": (
            config.classifier_activation != "gelu"
        ),
        **{name: getattr(config, name) for name in _BIASES},
        "decoder_bias false": not config.decoder_bias,
        # `window` is split into two equal sides.
        f"local_attention {config.local_attention}": config.local_attention % 2 != 0,
        # Only a regular pattern can be expressed by `global_every`.
        f"layer_types {types}": types != _layer_types(len(types), _global_every(types)),
        "a rope_type but default": any(part["rope_type"] != "default" for part in bases.values()),
        "tie_word_embeddings false": not config.tie_word_embeddings,
    }
    return [key for key, differs in missing_by_part.items() if differs]


_BIASES = ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")


def counterpart(shape: ModernBertShape) -> Counterpart:
    """Return the mapping of our parameters to ModernBERT's.

    ModernBERT stores query, key and value as one matrix, and the feed-forward's `gate` and `up` as
    another.
    """
    modules = _OUTSIDE | repeat_in_blocks(shape.num_layers, "blocks", "model.layers", _BLOCK)
    return Counterpart(
        origins=parameter_origins(modules) | {"head.bias": Origin(name="decoder.bias")},
        tied={"decoder.weight": f"{_TOKENS}.weight"},
        prefix="model.",
        unused=(r"model\.rotary_emb\..*",),
    )


def _layer_types(num_layers: int, global_every: int) -> list[str]:
    return [_LOCAL if number % global_every else _GLOBAL for number in range(num_layers)]


def _global_every(types: list[str]) -> int:
    """Return the distance between the first two global layers.

    If only one layer is global, return the number of layers.
    """
    places = [number for number, kind in enumerate(types) if kind == _GLOBAL]
    return places[1] - places[0] if len(places) > 1 else len(types)


# Tables that may have rows without an id, see `embedding_multiple`; the export omits them.
_ROWS_PER_ID = ("embeddings.tokens.weight", "head.bias")
_SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def export(
    shape: ModernBertShape,
    state: Mapping[str, Tensor],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
) -> None:
    """Write config.json, the weights and the tokenizer's files.

    The decoder's weight is not in the file: transformers ties it to the token embedding, as this
    model does.
    """
    weights = counterpart(shape).to_theirs(IdRows(state, _ROWS_PER_ID, shape.num_ids))
    hf.export(
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        to_config(shape),
        weights,
        tokenizer,
        path,
        form,
        special=_SPECIAL,
    )
