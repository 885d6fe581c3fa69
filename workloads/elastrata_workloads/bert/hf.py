"""BERT in the format of transformers: configuration, parameter names and folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from elastrata.workload.hf_folder import WeightForm
from elastrata.workload.hf_mapping import Counterpart
from elastrata_pipelines.errors import UserError
from elastrata_workloads.bert.shape import BertShape
from elastrata_workloads.unpadded import hf
from elastrata_workloads.unpadded.hf import IdRows

# Parameters of next-sentence prediction, which a masked-language model does not have.
_SECOND_HEAD = (r"bert\.pooler\..*", r"cls\.seq_relationship\..*")
_DECODER = "cls.predictions.decoder"
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by transformers' names; ours with several are exported under the first."""


def from_config(config: Any) -> dict[str, Any]:
    """Return the settings of the workload `bert` for a BertConfig."""
    architectures = config.architectures or []
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "layer_norm_eps": config.layer_norm_eps,
        "activation": _ACTIVATIONS[config.hidden_act],
        "initializer_range": config.initializer_range,
        "next_sentence": "BertForPreTraining" in architectures,
    }


def find_unsupported(config: Any) -> list[str]:
    """Return the parts of a BertConfig that our model lacks; empty if it has all."""
    missing_by_part = {
        f"hidden_act {config.hidden_act}": config.hidden_act not in _ACTIVATIONS,
        f"type_vocab_size {config.type_vocab_size}": config.type_vocab_size != 2,
        "is_decoder": config.is_decoder,
        "tie_word_embeddings false": not config.tie_word_embeddings,
    }
    return [key for key, differs in missing_by_part.items() if differs]


def counterpart(*, next_sentence: bool) -> Counterpart:
    """Return the mapping to transformers' BERT, which has the same tensors and names.

    Args:
        next_sentence: whether our model has a pooler and a next-sentence head.
    """
    return Counterpart(
        tied={
            f"{_DECODER}.weight": "bert.embeddings.word_embeddings.weight",
            f"{_DECODER}.bias": "cls.predictions.bias",
        },
        prefix="bert.",
        unused=(r"bert\.embeddings\.position_ids",),
        left_out=() if next_sentence else _SECOND_HEAD,
    )


# Tables that may have rows without an id, see `embedding_multiple`; the export omits them.
_ROWS_PER_ID = ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")


def export(
    shape: BertShape,
    state: Mapping[str, Tensor],
    tokenizer: Path | None,
    path: Path,
    form: WeightForm,
) -> None:
    """Write config.json, the weights and the tokenizer's files.

    The decoder's weight and bias are not in the file: transformers ties them to the word embedding
    and to `cls.predictions.bias`, as this model does.

    Raises:
        UserError: transformers has no model of this shape.
    """
    if shape.qk_norm:
        raise UserError("workload.qk_norm: true: transformers has no such model")
    values = {
        "vocab_size": shape.num_ids,
        "pad_token_id": shape.pad_id,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "layer_norm_eps": shape.layer_norm_eps,
        "hidden_dropout_prob": shape.dropout,
        # Attention weights are never dropped: the varlen kernel has no dropout.
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": shape.initializer_range,
        "hidden_act": next(n for n, ours in _ACTIVATIONS.items() if ours == shape.activation),
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    }
    architecture = "BertForPreTraining" if shape.next_sentence else "BertForMaskedLM"
    weights = IdRows(state, _ROWS_PER_ID, shape.num_ids).items()
    hf.export("BertConfig", architecture, values, weights, tokenizer, path, form)
