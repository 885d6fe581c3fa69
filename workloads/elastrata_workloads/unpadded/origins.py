"""Tables of where a model's parameters lie in transformers', from one row for each module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elastrata.core.counterpart import Origin


def in_blocks(
    num_layers: int, ours: str, theirs: str, modules: Mapping[str, Origin]
) -> dict[str, Origin]:
    """Rows for the modules of every block, from those of one.

    Args:
        num_layers: number of blocks.
        ours: before the number of a block, with us: `blocks`.
        theirs: likewise with them: `model.layers`.
        modules: of a block.
    """
    return {
        f"{ours}.{layer}.{name}": replace(origin, name=f"{theirs}.{layer}.{origin.name}")
        for layer in range(num_layers)
        for name, origin in modules.items()
    }


def of_parameters(modules: Mapping[str, Origin]) -> dict[str, Origin]:
    """The weight and the bias that every module may have. A bias is never transposed."""
    return {
        f"{name}.{part}": replace(
            origin,
            name=f"{origin.name}.{part}",
            transposed=origin.transposed and part == "weight",
        )
        for name, origin in modules.items()
        for part in ("weight", "bias")
    }
