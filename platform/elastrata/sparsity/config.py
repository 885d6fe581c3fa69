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
    """Name of the method; each has further keys."""
    layers: Patterns = ("*",)
    """Names or patterns of the sparse layers. Default: all matrices of attention and feed-forward;
    no others can be sparse."""


class DrawnKeys(SparsityKeys):
    """Keys of methods with random masks, at least initially."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Seed of the masks. Default: the run's. With one seed, a lower level's zeros are among those
    of a higher level."""


class LayerLevel(Config):
    """Level of some layers, which overrides the distribution."""

    layers: Patterns
    """Names or patterns of the layers."""
    level: Level
    """Share of their weights that is held at zero."""


class LevelKeys(DrawnKeys):
    """Keys of methods with a configurable level."""

    level: Level
    """Share of the sparse layers' weights that is held at zero."""
    distribution: Literal["uniform", "erdos_renyi"] = "uniform"
    """Distribution of the level. uniform: the same for every layer. erdos_renyi: layers of m rows
    and n columns keep weights in proportion to m + n, so large ones are sparser (Mocanu et al.,
    arXiv 1707.04780); for matrices equal to the kernel variant (Evci et al., arXiv 1911.11134)."""
    levels: Annotated[tuple[LayerLevel, ...], Field(max_length=1000)] = ()
    """Levels of individual layers; if several entries match, the last one applies."""


class StaticConfig(LevelKeys):
    """A constant random set of weights is held at zero."""

    method: Literal["static"] = "static"
    """Static random masks, the default."""


class RiglSchedule(Config):
    """Interval and size of the changes of masks."""

    every: Annotated[int, Field(gt=0, le=10**9)] = 100
    """Steps between mask updates, counted from the phase's first step."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of a layer's nonzero weights that the first update would replace. It falls along a half
    cosine to 0 at `until`."""


class RiglConfig(LevelKeys):
    """RigL (Evci et al., arXiv 1911.11134): periodically, the smallest weights are replaced by
    those with the largest gradients. Layers keep their levels."""

    method: Literal["rigl"]
    """RigL."""
    schedule: RiglSchedule = RiglSchedule()
    """Interval and size of the updates of masks."""
    until: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Share of the phase's steps after which masks are constant."""


class BlockConfig(LevelKeys):
    """A constant random set of square blocks of weights is held at zero."""

    method: Literal["block"]
    """Static random masks of blocks."""
    block: Annotated[int, Field(ge=2, le=2**20)] = 32
    """Rows and columns of a block; must divide those of the layers."""


class TwoFourConfig(DrawnKeys):
    """Two random weights of every four neighbours in a row are held at zero, in a constant
    pattern that NVIDIA's GPUs multiply faster since Ampere."""

    method: Literal["two_four"]
    """Two zeros in every four weights."""
    level: Annotated[float, Field(ge=0.5, le=0.5)] = 0.5
    """Share of the weights that is held at zero; always 0.5."""
    kernels: bool = False
    """Whether forward passes use PyTorch's semi-structured kernels, which skip zeros, on GPUs that
    have them. Needs precision bf16. Backward passes stay dense."""


class GivenConfig(SparsityKeys):
    """The constant set of weights in a file is held at zero."""

    method: Literal["given"]
    """Masks from a file."""
    masks: Annotated[str, Field(min_length=1)]
    """Path or URL of a file that `elastrata export` writes with a sparse model's weights. Layers
    not in it are dense."""


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
