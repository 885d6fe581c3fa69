"""The cross entropy of logits whose columns are divided over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from elastrata_workloads.unpadded.loss import cross_entropy, mask_logits_without_ids


@dataclass(frozen=True)
class Found:
    """What came of one case."""

    total: Tensor
    right: Tensor
    gradient: Tensor
    """Of twice the total, with a third of the squares where these are asked for; whole."""
    columns: int
    """That this rank had of the logits."""


def divided_cross_entropy(
    rank: int,
    world_size: int,
    cases: Sequence[tuple[Tensor, Tensor]],
    num_ids: int,
    with_squares: bool = False,
) -> list[Found]:
    """Of each case: logits, and the targets."""
    mesh = init_device_mesh("cpu", (world_size,))
    found = []
    for logits, targets in cases:
        part = logits.chunk(world_size, dim=1)[rank].clone().requires_grad_()
        divided = mask_logits_without_ids(DTensor.from_local(part, mesh, [Shard(1)]), num_ids)
        assert isinstance(divided, DTensor)
        sums = cross_entropy(divided, targets, with_squares=with_squares)
        loss = 2 * sums.total + (0.0 if sums.squares is None else sums.squares / 3)
        loss.backward()
        assert part.grad is not None
        gradient = DTensor.from_local(part.grad, mesh, [Shard(1)]).full_tensor()
        columns = divided.to_local().shape[1]
        found.append(Found(loss.detach(), sums.num_right, gradient, columns))
    return found
