"""How a plain BERT is taken apart: the units of sharding, checkpointing and compilation."""

from __future__ import annotations

from torch import nn

from elastrata_workloads.bert.model import BertModel


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, first to last.

    Raises:
        TypeError: not a BERT.
    """
    if not isinstance(model, BertModel):
        raise TypeError(f"expected a BertModel, got {type(model).__name__}")
    return list(model.bert.encoder.layer)
