"""Exponential moving average of a model's weights, sharded like the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from elastrata.config import Config
from elastrata.parallel.sharding import local

AVERAGE = "average"
"""Key of the averaged weights in a checkpoint."""
_StorageKey = tuple[str, int, int, torch.Size]


class AverageConfig(Config):
    """An exponential average of the weights (Polyak and Juditsky, 1992). It does not affect the
    training."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Share of the average that a step keeps; at most (1 + n) / (10 + n) in step n, so less at
    first."""
    evaluated: bool = False
    """Whether evaluations, and so the best checkpoint and the target, use the average instead of
    the weights."""


class WeightAverage:
    """Moving average of this rank's weight shards.

    Args:
        config: the decay.
        weights: the model's live tensors by their names in checkpoints. Tied weights may appear
            under several names.
        sharded: FSDP modules that may keep whole copies of weights gathered for a while.
    """

    def __init__(
        self,
        config: AverageConfig,
        weights: Mapping[str, Tensor],
        sharded: Sequence[FSDPModule] = (),
    ) -> None:
        self._decay, self._sharded = config.decay, sharded
        averages: dict[_StorageKey, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._state: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.is_floating_point():
                storage_key = _storage_key(name, weight)
                if storage_key not in averages:
                    averages[storage_key] = torch.empty_like(weight, requires_grad=False)
                    self._pairs.append((local(averages[storage_key]), local(weight)))
                self._state[name] = averages[storage_key]

    @torch.no_grad()
    def begin(self) -> None:
        """Initialise the average with the current weights."""
        for average, weight in self._pairs:
            average.copy_(weight)

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """Add the weights after `step` (counted from 1) to the average."""
        # A short memory at first, so that the random weights of the first steps do not stay in the
        # average.
        decay = min(self._decay, (1 + step) / (10 + step))
        averages, weights = zip(*self._pairs, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the live averages, as a part of a checkpoint."""
        return {AVERAGE: dict(self._state)}

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Exchange weights and averages while the block runs. Collective."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # FSDP2 would otherwise use a gathered copy of the weights from before the exchange.
        for module in self._sharded:
            module.reshard()
        for average, weight in self._pairs:
            previous = weight.clone()
            weight.copy_(average)
            average.copy_(previous)


def _storage_key(name: str, tensor: Tensor) -> _StorageKey:
    """Return a key of the memory of this rank's shard. Tied tensors have the same key."""
    shard = local(tensor)
    # Empty shards of different tensors may have the same address, so their key includes the name.
    name_if_empty = "" if shard.numel() else name
    return name_if_empty, shard.untyped_storage()._cdata, int(shard.storage_offset()), shard.shape
