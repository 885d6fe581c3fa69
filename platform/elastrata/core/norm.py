"""2-norms of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

_ROW = 4096
"""So many squares are added up in fp32 at once."""
_SMALL = 1e-12
"""Below it, squares may be lost in fp32."""


def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, an fp32 scalar.

    Collective over the mesh that shards them, and the same on every rank.
    """
    if not gradients or gradients[0].device.type != "cpu":
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    return gradient_norms([gradients])[0].float()


def gradient_norms(buckets: Sequence[Sequence[Tensor]]) -> Tensor:
    """The norm of each of some buckets of gradients, float64, shape [buckets].

    Collective over the mesh that shards them, one message for each axis, and the same on every
    rank.
    """
    squares: dict[tuple[dist.ProcessGroup, ...], list[list[Tensor]]] = {}
    for place, bucket in enumerate(buckets):
        for gradient in bucket:
            parts = squares.setdefault(_groups(gradient), [[] for _ in buckets])
            parts[place].append(tensor_norm(_local(gradient)).square())
    device = next((gradient.device for bucket in buckets for gradient in bucket), None)
    totals = torch.zeros(len(buckets), dtype=torch.float64, device=device)
    for groups, parts in squares.items():
        square = torch.stack([_total(part, device) for part in parts])
        for group in groups:
            dist.all_reduce(square, group=group)
        totals += square
    return totals.sqrt()


def _total(squares: Sequence[Tensor], device: torch.device | None) -> Tensor:
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(list(squares)).sum()


def tensor_norm(values: Tensor) -> Tensor:
    """The norm of one tensor, a float64 scalar; not finite only where a value is not.

    A CPU adds up one square after the other: in fp32, 33 million of them gave a norm that was 0.15%
    too small. There, rows are added up first, in fp32, 23 times as fast as all of it in float64.
    Squares of very large and very small numbers do not fit into fp32; then float64 does it.
    """
    if values.device.type == "cpu":
        flat = values.flatten()
        whole = flat[: len(flat) // _ROW * _ROW].view(-1, _ROW)
        rest = torch.linalg.vector_norm(flat[whole.numel() :])
        parts = torch.cat([torch.linalg.vector_norm(whole, dim=1), rest[None]])
        if _SMALL < (norm := _in_float64(parts)) < math.inf:
            return norm
    return _in_float64(values)


def _in_float64(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that have the other shards, one for each axis of the mesh that shards."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        gradient.device_mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not isinstance(placement, Replicate)
    )
