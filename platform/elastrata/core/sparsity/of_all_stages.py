"""What the stages of a pipeline know of their layers, put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def of_all_stages(
    values: Mapping[str, Value], pipeline: dist.ProcessGroup | None
) -> dict[str, Value]:
    """The values of all layers, the same on every rank. Collective over the ranks of a pipeline.

    Args:
        values: of this rank's layers, by name.
        pipeline: the ranks that have the model's stages between them; None: this one has all.
    """
    if pipeline is None:
        return dict(values)
    heard: list[dict[str, Value]] = [{}] * pipeline.size()
    dist.all_gather_object(heard, dict(values), group=pipeline)
    return {name: value for part in heard for name, value in part.items()}
