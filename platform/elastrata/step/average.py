"""The exponential average of a model's weights, kept beside them: sharded as they are."""

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
"""The part of a checkpoint with the averaged weights."""
_Place = tuple[str, int, int, torch.Size]


class AverageConfig(Config):
    """An exponential average of the weights (Polyak and Juditsky, 1992), which changes nothing of
    the training."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """The share of the average that stays in every step; less in a run's first steps, of which step
    n keeps at most (1 + n) / (10 + n)."""
    evaluated: bool = False
    """Evaluations are of the average, in place of the weights, and decide which checkpoint is the
    best and when the target is reached."""


class WeightAverage:
    """The average of this rank's shards.

    Args:
        config: how fast it forgets.
        weights: the model's tensors by name, as checkpoints have them: live, of which some may be
            the same, as tied ones are.
        sharded: modules that may hold whole copies of weights for a while.
    """

    def __init__(
        self,
        config: AverageConfig,
        weights: Mapping[str, Tensor],
        sharded: Sequence[FSDPModule] = (),
    ) -> None:
        self._decay, self._sharded = config.decay, sharded
        averages: dict[_Place, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._state: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.is_floating_point():
                place = _place(name, weight)
                if place not in averages:
                    averages[place] = torch.empty_like(weight, requires_grad=False)
                    self._pairs.append((local(averages[place]), local(weight)))
                self._state[name] = averages[place]

    @torch.no_grad()
    def begin(self) -> None:
        """Begins with the weights as they are."""
        for average, weight in self._pairs:
            average.copy_(weight)

    @torch.no_grad()
    def stepped(self, step: int) -> None:
        """The weights after that step, counted from 1, come in."""
        kept = min(self._decay, (1 + step) / (10 + step))
        averages, weights = zip(*self._pairs, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - kept)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The part of a checkpoint with the averages, live."""
        return {AVERAGE: dict(self._state)}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the averages in the place of the weights while its block runs. Collective."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self._sharded:
            module.reshard()
        for average, weight in self._pairs:
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _place(name: str, tensor: Tensor) -> _Place:
    """The memory of this rank's shard; the same for tensors that are tied, unless it is empty: then
    others may lie there, too."""
    shard = local(tensor)
    own = "" if shard.numel() else name
    return own, shard.untyped_storage()._cdata, int(shard.storage_offset()), shard.shape
