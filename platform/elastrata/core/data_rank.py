"""The place of a rank where several share their samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataRank:
    """Ranks that compute the same samples together, by tensor or pipeline parallelism, are one data
    rank."""

    rank: int
    """Of the data rank, 0 to `dp_size` - 1."""
    dp_size: int
    """Among so many data ranks every global batch is dealt."""
    is_primary: bool
    """Whether this is the first rank of its data rank. Sums over samples are added up over these
    alone, so that they have every sample once."""


def data_rank(rank: int, world_size: int, tensor: int, pipeline: int = 1) -> DataRank:
    """The place of a rank in a mesh of `rank_mesh`: `tensor` neighbours share their samples, and so
    do the ranks at the same place of each of `pipeline` equal parts of all ranks.

    Raises:
        ValueError: `tensor` times `pipeline` does not divide the world size.
    """
    if world_size % (tensor * pipeline):
        raise ValueError(f"{world_size} ranks in groups of {tensor * pipeline}")
    dp_size = world_size // (tensor * pipeline)
    place = rank // tensor
    return DataRank(place % dp_size, dp_size, is_primary=place < dp_size and rank % tensor == 0)
