"""The place of a rank where several share their samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRank:
    """Ranks that compute the same samples together, by tensor parallelism, are one data rank."""

    rank: int
    """Of the data rank, 0 to `dp_size` - 1."""
    dp_size: int
    """Among so many data ranks every global batch is dealt."""
    counts: bool
    """Whether this rank's sums over samples count: those of the first rank of each data rank do, so
    that a sum over all ranks has every sample once."""


def data_rank(rank: int, world_size: int, tensor: int) -> DataRank:
    """Neighbours share their samples, `tensor` of them each, as in `rank_mesh`.

    Raises:
        ValueError: `tensor` does not divide the world size.
    """
    if world_size % tensor:
        raise ValueError(f"{world_size} ranks in groups of {tensor}")
    return DataRank(rank // tensor, world_size // tensor, counts=rank % tensor == 0)
