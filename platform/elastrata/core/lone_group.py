"""A process group of this process alone, so that one device runs what many would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def lone_group(device: torch.device) -> Iterator[None]:
    """Runs its block in a group of one rank: NCCL for a GPU, else gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
