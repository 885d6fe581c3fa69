"""Problems of the sparsity of a recipe, told before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from elastrata.core.sparsity.config import (
    AnySparsity,
    BlockConfig,
    LevelKeys,
    TwoFourConfig,
)
from elastrata.core.sparsity.kernels import MULTIPLE
from elastrata.core.sparsity.layers import Shapes, layers_named

Problem = tuple[tuple[str, ...], str]
"""The key to change, and the line about it."""
_NEIGHBOURS = 4
_NUM_NEAREST = 3


def sparsity_problems(config: AnySparsity, shapes: Shapes) -> Iterator[Problem]:
    """One for each thing that cannot work.

    Args:
        config: a phase's.
        shapes: of all layers that may be sparse.
    """
    yield from _unknown_layers(("layers",), config.layers, shapes)
    sparse = {name: shapes[name] for name in layers_named(shapes, config.layers)}
    if isinstance(config, LevelKeys):
        for number, given in enumerate(config.levels):
            path = ("levels", str(number), "layers")
            yield from _unknown_layers(path, given.layers, sparse)
    if isinstance(config, BlockConfig):
        yield from _indivisible(sparse, config.block)
    if isinstance(config, TwoFourConfig):
        yield from _not_in_fours(sparse)
        if config.kernels:
            yield from _not_for_kernels(sparse)


def _unknown_layers(
    path: tuple[str, ...], patterns: Sequence[str], shapes: Shapes
) -> Iterator[Problem]:
    for number, pattern in enumerate(patterns):
        if not layers_named(shapes, [pattern]):
            where = ".".join(("sparsity", *path, str(number)))
            yield (
                (*path, str(number)),
                f"{where}: {pattern!r}: no layer has that name; the nearest: "
                f"{', '.join(_nearest(pattern, shapes))}",
            )


def _nearest(pattern: str, shapes: Shapes) -> list[str]:
    """Names with `*` for the numbers in them, those most like the pattern first."""
    known = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in shapes))
    return get_close_matches(pattern, known, n=_NUM_NEAREST, cutoff=0.0)


def _indivisible(sparse: Shapes, block: int) -> Iterator[Problem]:
    for name, (rows, columns) in sparse.items():
        if rows % block or columns % block:
            yield (
                ("block",),
                f"sparsity.block: {block}: expected a divisor of the {rows} rows and {columns} "
                f"columns of {name}",
            )
            return


def _not_in_fours(sparse: Shapes) -> Iterator[Problem]:
    for name, (_, columns) in sparse.items():
        if columns % _NEIGHBOURS:
            yield (
                ("method",),
                f"sparsity.method: 'two_four': expected layers with rows of a multiple of four "
                f"weights, not {columns} as in {name}; leave it out of sparsity.layers",
            )
            return


def _not_for_kernels(sparse: Shapes) -> Iterator[Problem]:
    for name, (rows, columns) in sparse.items():
        if rows % MULTIPLE or columns % MULTIPLE:
            yield (
                ("kernels",),
                f"sparsity.kernels: true: expected layers of multiples of {MULTIPLE} rows and "
                f"columns, not {rows} by {columns} as {name}; leave it out of sparsity.layers",
            )
            return
