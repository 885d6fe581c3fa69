"""BERT as transformers has it: its configuration to ours, and where our parameters lie in it."""

from __future__ import annotations

from typing import Any

from elastrata.core.counterpart import Counterpart

_SECOND_HEAD = (r"bert\.pooler\..*", r"cls\.seq_relationship\..*")
_DECODER = "cls.predictions.decoder"


def from_config(config: Any) -> dict[str, Any]:
    """The settings of the workload `bert` for a BertConfig."""
    architectures = config.architectures or []
    return {
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "max_positions": config.max_position_embeddings,
        "layer_norm_eps": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "next_sentence": "BertForPreTraining" in architectures,
    }


def unsupported(config: Any) -> list[str]:
    """Parts that a BertConfig asks for and our model does not have; empty: it has all."""
    lacks = {
        f"hidden_act {config.hidden_act}": config.hidden_act != "gelu",
        f"type_vocab_size {config.type_vocab_size}": config.type_vocab_size != 2,
        "is_decoder": config.is_decoder,
        "tie_word_embeddings false": not config.tie_word_embeddings,
    }
    return [key for key, differs in lacks.items() if differs]


def counterpart(*, next_sentence: bool) -> Counterpart:
    """Where our parameters lie in it: the same tensors under the same names.

    Args:
        next_sentence: whether our model has the pooler and the head that predicts it.
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
