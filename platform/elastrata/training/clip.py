"""Gradient clipping."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elastrata.recipe.config import Config
from elastrata.training.order_free import order_free_norm


class ClipConfig(Config):
    """Limits the gradient before the optimizer sees it."""

    method: Literal["global_norm", "none"] = "global_norm"
    """global_norm: scale the whole gradient down where its 2-norm exceeds `max_norm`."""
    max_norm: Annotated[float, Field(gt=0)] = 1.0


def clip_gradient(config: ClipConfig, model: nn.Module, *, ordered: bool = False) -> Tensor:
    """Clips in place and returns the 2-norm of the whole gradient before clipping, a scalar.

    Collective over the mesh that shards the parameters.

    Args:
        config: how, and the limit.
        model: with gradients.
        ordered: whether no bit of the norm may depend on how the parameters are sharded.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if ordered:
        norm = order_free_norm(gradients)
    else:
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if config.method == "global_norm":
        torch.nn.utils.clip_grads_with_norm_(
            model.parameters(), config.max_norm, norm, foreach=True
        )
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
