"""How a plain GPT is taken apart: the units of sharding, checkpointing and compilation."""

from __future__ import annotations

from torch import nn

from elastrata_workloads.gpt.model import GptModel


def blocks(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, first to last.

    Raises:
        TypeError: not a GPT.
    """
    if not isinstance(model, GptModel):
        raise TypeError(f"expected a GptModel, got {type(model).__name__}")
    return list(model.blocks)
