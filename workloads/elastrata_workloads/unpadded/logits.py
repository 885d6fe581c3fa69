"""Logits over the vocabulary: whole, or divided over ranks that compute a sample together.

P predictions, V ids; C: columns of one rank, V / number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def of_ids(logits: Tensor, num_ids: int, dtype: torch.dtype) -> Tensor:
    """The logits of ids, where the table of the vocabulary has rows that are none.

    Args:
        logits: shape [P, rows of the table].
        num_ids: the first so many are ids.
        dtype: of the result.

    Returns:
        Shape [P, num_ids]; divided logits keep their shape, and are -inf where there is no id.
    """
    if logits.shape[1] == num_ids:
        return logits.to(dtype)
    if isinstance(logits, DTensor):
        return _without_others(logits, num_ids).to(dtype)
    # A copy even of the same dtype: FSDP2's backward hooks are lost on views.
    return logits[:, :num_ids].to(dtype, copy=True)


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The cross entropy, summed over predictions, and how many of them are right.

    Divided logits stay where they are: what the ranks tell each other of a prediction is four
    numbers (as Shoeybi et al. 2019, arXiv 1909.08053, section 3, but in one message). Collective
    over these ranks, and the same on each.

    Args:
        logits: shape [P, V], fp32; a DTensor where its columns are divided over ranks.
        targets: shape [P].
    """
    if isinstance(logits, DTensor):
        rank, part = logits.device_mesh.get_local_rank(), logits.to_local()
        sums: tuple[Tensor, Tensor] = _Divided.apply(  # type: ignore[no-untyped-call]
            part, targets - rank * part.shape[1], logits.device_mesh.get_group()
        )
        return sums
    right = (logits.detach().argmax(dim=-1) == targets).sum().float()
    return F.cross_entropy(logits, targets, reduction="sum"), right


class _Divided(torch.autograd.Function):
    """Cross entropy over columns that are divided."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """The sums over all columns, from this rank's.

        Args:
            ctx: torch's.
            logits: shape [P, C].
            targets: shape [P]: counted from this rank's first column, so maybe none of its own.
            group: the ranks, in the order of columns.
        """
        is_here = (targets >= 0) & (targets < logits.shape[1])
        column = targets.clamp(0, logits.shape[1] - 1)[:, None]
        of_target = torch.where(is_here, logits.gather(1, column)[:, 0], 0.0)
        largest, where = logits.max(dim=1)
        # Whether the largest one is the target's own, and not another one of the same value.
        is_right = (is_here & (where == targets)).to(logits.dtype)
        told = torch.stack([logits.logsumexp(1), of_target, largest, is_right])
        heard = told.new_empty(group.size(), *told.shape)
        dist.all_gather(list(heard.unbind()), told, group=group)
        sums, of_targets, largests, are_right = heard.unbind(1)
        total = sums.logsumexp(0)
        winners = largests.argmax(0, keepdim=True)  # the first, where there are several
        right = are_right.gather(0, winners).sum()
        ctx.save_for_backward(logits, total, column, is_here)
        ctx.mark_non_differentiable(right)
        return (total - of_targets.sum(0)).sum(), right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Softmax less 1 at the target, times the gradient of the sum."""
        logits, total, column, is_here = ctx.saved_tensors
        gradient = (logits - total[:, None]).exp_()
        gradient.scatter_add_(1, column, -is_here[:, None].to(gradient.dtype))
        return gradient.mul_(gradients[0]), None, None


def _without_others(logits: DTensor, num_ids: int) -> DTensor:
    """Divided logits with -inf where there is no id."""
    rank, part = logits.device_mesh.get_local_rank(), logits.to_local()
    ids_here = num_ids - rank * part.shape[1]
    if ids_here < part.shape[1]:
        columns = torch.arange(part.shape[1], device=part.device)
        part = part.masked_fill(columns >= ids_here, -math.inf)
    return DTensor.from_local(part, logits.device_mesh, logits.placements, run_check=False)
