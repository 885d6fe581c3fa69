"""Recipe keys of sparsity: which weights of a model are held at zero, and their share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from elastrata.config import Config

Level = Annotated[float, Field(ge=0, lt=1)]
"""Share of weights that are held at zero."""
Pattern = Annotated[str, Field(max_length=1000)]
Patterns = Annotated[tuple[Pattern, ...], Field(min_length=1, max_length=1000)]
"""Layers, each a matrix, by name (`blocks.0.attention.query`) or pattern (`*.query`), in which
`*` matches anything."""


class SparsityKeys(Config):
    """Keys of all methods."""

    method: str
    """Which method; each has further keys of its own."""
    layers: Patterns = ("*",)
    """The layers that are sparse, by name or pattern. By default all matrices of attention and
    feed-forward; nothing else may be."""


class DrawnKeys(SparsityKeys):
    """Keys of methods with random masks, at least initially."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the masks. Default: the run's. With one seed, a lower level leaves the zeros of a
    higher one zero, or frees them; it never takes other weights."""


class LayerLevel(Config):
    """Level of some layers, which overrides the distribution."""

    layers: Patterns
    """By name or pattern."""
    level: Level
    """Share of their weights that is held at zero."""


class LevelKeys(DrawnKeys):
    """Keys of methods with a free choice of the level."""

    level: Level
    """Share of the weights of all sparse layers that is held at zero."""
    distribution: Literal["uniform", "erdos_renyi"] = "uniform"
    """How the level is spread. uniform: every layer has it. erdos_renyi: a layer of m rows and n
    columns keeps weights in proportion to m + n, so that large layers are sparser than small ones
    (Mocanu et al., arXiv 1707.04780); for matrices its kernel variant (Evci et al., arXiv
    1911.11134) is the same."""
    levels: Annotated[tuple[LayerLevel, ...], Field(max_length=1000)] = ()
    """Layers with a level of their own; of several that name a layer, the last one counts."""


class StaticConfig(LevelKeys):
    """A constant random set of weights is held at zero."""

    method: Literal["static"] = "static"
    """This method; the default."""


class RiglSchedule(Config):
    """Interval and size of the changes of masks."""

    every: Annotated[int, Field(gt=0, le=10**9)] = 100
    """Steps from one update to the next, counted from the first step of the phase."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of a layer's weights that are not zero which the first update would replace; it falls
    as half a cosine, to 0 at `until`."""


class RiglConfig(LevelKeys):
    """RigL (Evci et al., arXiv 1911.11134): periodically, the smallest weights are replaced by
    those with the largest gradients. Layers keep their levels."""

    method: Literal["rigl"]
    """This method."""
    schedule: RiglSchedule = RiglSchedule()
    """When masks change, and how much."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the phase's steps after which masks stay as they are."""


class BlockConfig(LevelKeys):
    """A constant random set of square blocks of weights is held at zero."""

    method: Literal["block"]
    """This method."""
    block: Annotated[int, Field(ge=2, le=2**20)] = 32
    """Rows and columns of a block; must divide those of the layers."""


class TwoFourConfig(DrawnKeys):
    """Two random weights of every four neighbours in a row are held at zero, in a constant
    pattern that NVIDIA's GPUs multiply faster since Ampere."""

    method: Literal["two_four"]
    """This method."""
    level: Annotated[float, Field(ge=0.5, le=0.5)] = 0.5
    """Share of the weights that is held at zero; there is no other."""
    kernels: bool = False
    """Forward passes multiply by PyTorch's semi-structured kernels, which skip the zeros, where a
    worker's GPU has them; needs precision bf16. Backward passes stay dense."""


class GivenConfig(SparsityKeys):
    """The constant set of weights in a file is held at zero."""

    method: Literal["given"]
    """This method."""
    masks: Annotated[str, Field(min_length=1)]
    """The file or its URL, as `elastrata export` writes it beside a sparse model's weights. A layer
    that it lacks is dense."""


def _with_default_method(value: Any) -> Any:
    # The discriminated union needs a method before it validates.
    return {"method": "static", **value} if isinstance(value, dict) else value


AnySparsity = StaticConfig | RiglConfig | BlockConfig | TwoFourConfig | GivenConfig
SparsityConfig = Annotated[
    StaticConfig | RiglConfig | BlockConfig | TwoFourConfig | GivenConfig | None,
    Field(discriminator="method"),
    BeforeValidator(_with_default_method),
]
"""One of the methods, static without a name; None: dense."""
