"""Membership: which rank this process is in its group of workers, and where all ranks compute."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import ray
import ray.util
import torch
import torch.distributed as dist

from elastrata.core.device import current_device, device_name
from elastrata.core.mesh import DataRank, data_rank
from elastrata.core.parallelize import ParallelConfig
from elastrata.trainer.pacing import RankPlace


class TrainContext(Protocol):
    """What Ray Train tells a worker."""

    def get_world_rank(self) -> int:
        """This process among all."""

    def get_local_rank(self) -> int:
        """This process among those of its node."""

    def get_world_size(self) -> int:
        """Processes in all."""

    def get_local_world_size(self) -> int:
        """Processes of its node."""


@dataclass(frozen=True)
class Member:
    """One rank's process."""

    place: RankPlace
    pid: int
    has_served: bool
    """Whether it was in a group before."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """This process among the ranks of its group."""

    rank: int
    local_rank: int
    world_size: int
    per_node: int
    """Ranks on this node."""
    parallel: ParallelConfig
    device: torch.device
    members: Sequence[Member]
    """By rank."""

    @classmethod
    def joined(
        cls, context: TrainContext, parallel: ParallelConfig, *, has_served: bool
    ) -> Membership:
        """Of the group of workers that Ray Train has started this process in. Collective.

        Args:
            context: Ray Train's.
            parallel: how the ranks divide the model.
            has_served: whether this process was in a group before.
        """
        device = current_device()
        world_size = context.get_world_size()
        member = Member(_place(device), os.getpid(), has_served)
        return cls(
            rank=context.get_world_rank(),
            local_rank=context.get_local_rank(),
            world_size=world_size,
            per_node=context.get_local_world_size(),
            parallel=parallel,
            device=device,
            members=of_all_ranks(member, world_size),
        )

    @property
    def data(self) -> DataRank:
        """The part of every batch that is this rank's."""
        return self._data(self.rank)

    @cached_property
    def data_ranks(self) -> list[int]:
        """Of all ranks: which ones compute the same samples."""
        return [self._data(rank).rank for rank in range(self.world_size)]

    @property
    def places(self) -> list[RankPlace]:
        """Of all ranks."""
        return [member.place for member in self.members]

    @property
    def nodes(self) -> list[str]:
        """The node of every rank, by its id."""
        return [place.node for place in self.places]

    @property
    def pids(self) -> Mapping[int, tuple[str, int]]:
        """Node and process of every rank."""
        return {rank: (one.place.node, one.pid) for rank, one in enumerate(self.members)}

    @property
    def num_stayed(self) -> int:
        """Processes that were in a group before."""
        return sum(member.has_served for member in self.members)

    def _data(self, rank: int) -> DataRank:
        return data_rank(rank, self.world_size, self.parallel.tensor, self.parallel.pipeline)


def of_all_ranks(value: Any, world_size: int) -> list[Any]:
    """Every rank's value, by rank. Collective."""
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def _place(device: torch.device) -> RankPlace:
    """Where this rank computes."""
    kind = device_name(device) if device.type == "cuda" else "CPU"
    node: str = ray.get_runtime_context().get_node_id()
    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return RankPlace(node=node, host=host, device=kind)
