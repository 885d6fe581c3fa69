"""The loss of a model's predictions, over a vocabulary that may be sharded over ranks.

P predictions, V rows of the vocabulary's table; C: columns of one rank, V / number of ranks, or V.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastrata.workload.model_spec import LOGITS_AT_ONCE
from elastrata.workload.workload import Loss, Metric
from elastrata_workloads.unpadded.batch import UnpaddedBatch, source_losses


def terms_of(term: str, z_loss: float) -> tuple[str, ...]:
    """The terms that every prediction counts in."""
    return (term, "z") if z_loss else (term,)


def prediction_loss(term: str, logits: Tensor, batch: UnpaddedBatch, z_loss: float = 0.0) -> Loss:
    """Return the sum of cross-entropies, always in fp32, and the number of right answers."""
    with_each = batch.sources is not None
    found = cross_entropy(logits, batch.targets, with_squares=z_loss > 0, with_each=with_each)
    terms = {term: found.total}
    if found.squares is not None:
        terms["z"] = z_loss * found.squares
    by_source = source_losses(found.each, batch.sources, batch.source_names)
    return Loss(terms, {f"{term}_accuracy": Metric(found.num_right, per=term), **by_source})


_AT_ONCE_ON_CPU = 2**20


def of_ids(logits: Tensor, num_ids: int) -> Tensor:
    """The logits of ids, where the table of the vocabulary has rows that are none: these become
    -inf, in place where that can be."""
    if not isinstance(logits, DTensor):
        return _without_others(logits, num_ids)
    part = logits.to_local()
    first = logits.device_mesh.get_local_rank() * part.shape[1]
    part = _without_others(part, num_ids - first)
    return DTensor.from_local(part, logits.device_mesh, logits.placements, run_check=False)


@dataclass(frozen=True)
class CrossEntropy:
    """Sums over predictions."""

    total: Tensor
    num_right: Tensor
    """How many predictions are right."""
    squares: Tensor | None
    """Of the logarithm of each prediction's sum of exponentials; None: not asked for."""
    each: Tensor | None
    """Of each prediction, detached, shape [P]; None: not asked for."""


def cross_entropy(
    logits: Tensor, targets: Tensor, *, with_squares: bool = False, with_each: bool = False
) -> CrossEntropy:
    """The cross entropy, summed over predictions, and how many of them are right.

    Computed in fp32, whatever the logits are in, for some predictions at a time (as Hsu et al.
    2024, arXiv 2410.10989, section 3.2, with the logits' product left whole): beside the logits no
    more than `LOGITS_AT_ONCE` numbers are there at once. The backward pass writes the gradient
    over the logits, so there can be but one.

    Divided logits stay where they are: what the ranks tell each other of a prediction is four
    numbers (as Shoeybi et al. 2019, arXiv 1909.08053, section 3, but in one message). Collective
    over these ranks, and the same on each. The squares need no number more.

    Args:
        logits: shape [P, V]; a DTensor where its columns are divided over ranks.
        targets: shape [P].
        with_squares: whether `squares`, which z-loss is made of, are wanted.
        with_each: whether `each` is wanted.
    """
    group, part = None, logits
    if isinstance(logits, DTensor):
        group, part = logits.device_mesh.get_group(), logits.to_local()
        targets = targets - logits.device_mesh.get_local_rank() * part.shape[1]
    total, right, squares, each = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        part, targets, group, with_squares, with_each
    )
    return CrossEntropy(total, right, squares if with_squares else None, each)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over columns that may be divided."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        with_squares: bool,
        with_each: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The sums over all columns, from this rank's."""
        told = logits.new_empty(4, len(targets), dtype=torch.float32)
        for rows in _portions(logits):
            told[:, rows] = _statistics(logits[rows], targets[rows])
        total, of_target, right = (
            _put_together(told, group) if group else (told[0], told[1], told[3])
        )
        ctx.save_for_backward(logits, targets, total)
        ctx.is_over, ctx.with_squares = False, with_squares
        each, right = total - of_target, right.sum()
        ctx.mark_non_differentiable(right)
        squares = total.square().sum() if with_squares else None
        if not with_each:
            return each.sum(), right, squares, None
        ctx.mark_non_differentiable(right, each)
        return each.sum(), right, squares, each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Softmax less 1 at the target, times the gradient of the sum; and softmax times twice the
        logarithm, times the gradient of the squares."""
        if ctx.is_over:
            raise RuntimeError("cross_entropy: a second backward pass: its logits are overwritten")
        logits, targets, total = ctx.saved_tensors
        ctx.is_over = True
        gradient = torch.empty_like(logits) if logits.is_leaf else logits
        for rows in _portions(logits):
            part = _softmax(logits[rows], total[rows])
            if ctx.with_squares:
                part.mul_((gradients[0] + 2 * gradients[2] * total[rows])[:, None])
                part = _less_at(part, targets[rows], gradients[0])
            else:
                part = _less_at(part, targets[rows], 1.0).mul_(gradients[0])
            gradient[rows] = part
            del part  # or the next one would be there beside it
        return gradient, None, None, None, None


def _portions(logits: Tensor) -> Iterator[slice]:
    """All rows, so many at a time; on a CPU as many as a cache has room for."""
    at_once = LOGITS_AT_ONCE if logits.is_cuda else _AT_ONCE_ON_CPU
    rows = max(1, at_once // logits.shape[1])
    return (slice(first, first + rows) for first in range(0, logits.shape[0], rows))


def _columns(targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Whether the target's column is one of these, shape [P]; and its number, or any where it is
    not, shape [P, 1]."""
    is_here = (targets >= 0) & (targets < num_columns)
    return is_here, targets.clamp(0, num_columns - 1)[:, None]


def _statistics(logits: Tensor, targets: Tensor) -> Tensor:
    """Of each prediction, from these columns: the logarithm of the sum of exponentials; the logit
    of the target, or 0; the largest logit; and whether that is the target's own, and not another
    one of the same value. Shape [4, P]."""
    is_here, column = _columns(targets, logits.shape[1])
    largest, where = logits.max(dim=1)
    largest = largest.float()
    sums = (logits - largest[:, None]).exp_().sum(1)  # in fp32, as the largest is
    of_target = torch.where(is_here, logits.gather(1, column)[:, 0].float(), 0.0)
    is_right = (is_here & (where == targets)).float()
    # Where all are -inf, as columns without ids, the sum is no number, and the logarithm is -inf.
    logarithm = torch.where(largest == -math.inf, largest, sums.log() + largest)
    return torch.stack([logarithm, of_target, largest, is_right])


def _softmax(logits: Tensor, total: Tensor) -> Tensor:
    """In fp32, as the total is."""
    return (logits - total[:, None]).exp_()


def _less_at(values: Tensor, targets: Tensor, number: Tensor | float) -> Tensor:
    """Takes a number off at each target, in place."""
    is_here, column = _columns(targets, values.shape[1])
    return values.scatter_add_(1, column, -is_here[:, None].float() * number)


def _put_together(told: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The statistics over all columns, but for the largest logit, from those of each rank's."""
    heard = told.new_empty(group.size(), *told.shape)
    dist.all_gather(list(heard.unbind()), told, group=group)
    sums, of_targets, largests, are_right = heard.unbind(1)
    winners = largests.argmax(0, keepdim=True)  # the first, where there are several
    return sums.logsumexp(0), of_targets.sum(0), are_right.gather(0, winners)[0]


class _InPlace(torch.autograd.Function):
    """Sets all columns but the first few to -inf; the gradient there is zero anyway."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_columns: int) -> Tensor:
        ctx.mark_dirty(logits)
        logits[:, num_columns:] = -math.inf
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _without_others(logits: Tensor, num_columns: int) -> Tensor:
    """Logits with -inf in all columns but the first few, maybe none."""
    if num_columns >= logits.shape[1]:
        return logits
    if not (logits._is_view() or logits.is_leaf):
        out: Tensor = _InPlace.apply(logits, max(0, num_columns))  # type: ignore[no-untyped-call]
        return out
    columns = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(columns >= num_columns, -math.inf)
