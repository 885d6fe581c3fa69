"""The loss of a model's predictions, over a vocabulary that may be sharded over ranks.

Letters: P predictions; V rows of the vocabulary table; C columns of one rank, V / number of ranks,
or V if the vocabulary is not sharded.
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


def loss_terms(term: str, z_loss: float) -> tuple[str, ...]:
    """Return the names of the loss terms in which every prediction counts."""
    return (term, "z") if z_loss else (term,)


def prediction_loss(term: str, logits: Tensor, batch: UnpaddedBatch, z_loss: float = 0.0) -> Loss:
    """Return the sum of cross-entropies, always in fp32, and the number of correct predictions."""
    with_each = batch.sources is not None
    entropy = cross_entropy(logits, batch.targets, with_squares=z_loss > 0, with_each=with_each)
    terms = {term: entropy.total}
    if entropy.squares is not None:
        terms["z"] = z_loss * entropy.squares
    by_source = source_losses(entropy.each, batch.sources, batch.source_names)
    return Loss(terms, {f"{term}_accuracy": Metric(entropy.num_right, per=term), **by_source})


# On a CPU a chunk should fit into the cache.
_AT_ONCE_ON_CPU = 2**20


def mask_logits_without_ids(logits: Tensor, num_ids: int) -> Tensor:
    """Set the logits of table rows without an id to -inf, in place if possible."""
    if not isinstance(logits, DTensor):
        return _mask_columns(logits, num_ids)
    part = logits.to_local()
    # Rows without an id may begin in the middle of a rank's columns.
    first = logits.device_mesh.get_local_rank() * part.shape[1]
    part = _mask_columns(part, num_ids - first)
    return DTensor.from_local(part, logits.device_mesh, logits.placements, run_check=False)


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy sums over all predictions."""

    total: Tensor
    num_right: Tensor
    """Number of correct predictions."""
    squares: Tensor | None
    """Sum of squared log-sum-exps, for z-loss; None if not requested."""
    each: Tensor | None
    """Cross-entropy of each prediction, detached, shape [P]; None if not requested."""


def cross_entropy(
    logits: Tensor, targets: Tensor, *, with_squares: bool = False, with_each: bool = False
) -> CrossEntropy:
    """Return the cross-entropy, summed over predictions, and the number of correct ones.

    Always computed in fp32, for a chunk of predictions at a time (as Hsu et al. 2024, arXiv
    2410.10989, section 3.2, but with unchunked logits): at most `LOGITS_AT_ONCE` numbers are
    allocated in addition to the logits. The backward pass overwrites the logits with their
    gradient, so it can run only once.

    Sharded logits stay sharded: ranks exchange four numbers per prediction (as Shoeybi et al. 2019,
    arXiv 1909.08053, section 3, but in one message). The call is then a collective over these
    ranks, with the same result on each. `squares` needs no further communication.

    Args:
        logits: shape [P, V]; a DTensor if its columns are sharded over ranks.
        targets: shape [P].
        with_squares: whether to compute `squares`, which z-loss needs.
        with_each: whether to return `each`.
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
    """Autograd function of the cross-entropy over columns that may be sharded."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None,
        with_squares: bool,
        with_each: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the sums over all columns, given this rank's columns."""
        # One buffer of shape [4, P], so that a single collective exchanges all statistics.
        statistics = logits.new_empty(4, len(targets), dtype=torch.float32)
        for rows in _row_chunks(logits):
            statistics[:, rows] = _column_statistics(logits[rows], targets[rows])
        total, of_target, right = (
            _combine_ranks(statistics, group)
            if group
            else (statistics[0], statistics[1], statistics[3])
        )
        ctx.save_for_backward(logits, targets, total)
        # A second backward pass would read gradients as logits; `is_over` turns that into an error.
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
        """Return softmax minus one-hot target, times the gradient of the sum.

        If z-loss is requested, the result also has 2 * log-sum-exp * softmax, times the gradient of
        `squares`.
        """
        if ctx.is_over:
            raise RuntimeError("cross_entropy: a second backward pass: its logits are overwritten")
        logits, targets, total = ctx.saved_tensors
        ctx.is_over = True
        # Overwrites the logits: a second tensor of their size would dominate peak memory.
        gradient = torch.empty_like(logits) if logits.is_leaf else logits
        for rows in _row_chunks(logits):
            part = _softmax(logits[rows], total[rows])
            if ctx.with_squares:
                part.mul_((gradients[0] + 2 * gradients[2] * total[rows])[:, None])
                part = _subtract_at(part, targets[rows], gradients[0])
            else:
                part = _subtract_at(part, targets[rows], 1.0).mul_(gradients[0])
            gradient[rows] = part
            del part  # frees it before the next chunk is allocated
        return gradient, None, None, None, None


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Return slices of rows, each small enough to process at once."""
    at_once = LOGITS_AT_ONCE if logits.is_cuda else _AT_ONCE_ON_CPU
    rows = max(1, at_once // logits.shape[1])
    return (slice(first, first + rows) for first in range(0, logits.shape[0], rows))


def _locate_targets(targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is in these columns, shape [P], and its column, shape [P, 1].

    The column of a target that belongs to another rank is arbitrary.
    """
    is_here = (targets >= 0) & (targets < num_columns)
    return is_here, targets.clamp(0, num_columns - 1)[:, None]


def _column_statistics(logits: Tensor, targets: Tensor) -> Tensor:
    """Return four statistics of each prediction over these columns, shape [4, P].

    They are: the log-sum-exp; the target's logit, or 0 if it belongs to another rank; the largest
    logit; and whether the first column with the largest logit is the target's.
    """
    is_here, column = _locate_targets(targets, logits.shape[1])
    largest, where = logits.max(dim=1)
    largest = largest.float()
    # The largest logit is subtracted so that no exponential overflows.
    sums = (logits - largest[:, None]).exp_().sum(1)  # in fp32, as the largest is
    of_target = torch.where(is_here, logits.gather(1, column)[:, 0].float(), 0.0)
    is_right = (is_here & (where == targets)).float()
    # If all logits are -inf, as in columns without ids, the sum is NaN: the logarithm is -inf.
    logarithm = torch.where(largest == -math.inf, largest, sums.log() + largest)
    return torch.stack([logarithm, of_target, largest, is_right])


def _softmax(logits: Tensor, total: Tensor) -> Tensor:
    """Return the softmax in fp32, the dtype of `total`."""
    return (logits - total[:, None]).exp_()


def _subtract_at(values: Tensor, targets: Tensor, number: Tensor | float) -> Tensor:
    """Subtract a number at each target, in place."""
    is_here, column = _locate_targets(targets, values.shape[1])
    return values.scatter_add_(1, column, -is_here[:, None].float() * number)


def _combine_ranks(statistics: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the statistics of all ranks; the largest logit is not returned."""
    gathered = statistics.new_empty(group.size(), *statistics.shape)
    dist.all_gather(list(gathered.unbind()), statistics, group=group)
    sums, of_targets, largests, are_right = gathered.unbind(1)
    # Only the rank with the largest logit knows whether the prediction is correct.
    winners = largests.argmax(0, keepdim=True)  # the first of equal ones
    return sums.logsumexp(0), of_targets.sum(0), are_right.gather(0, winners)[0]


class _MaskInPlace(torch.autograd.Function):
    """Sets all but the first columns to -inf in place; their gradient is zero anyway."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_columns: int) -> Tensor:
        ctx.mark_dirty(logits)
        logits[:, num_columns:] = -math.inf
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _mask_columns(logits: Tensor, num_columns: int) -> Tensor:
    """Return logits with -inf in all but the first `num_columns` columns."""
    if num_columns >= logits.shape[1]:
        return logits
    # Autograd forbids in-place changes of leaves, and of views by a custom function.
    if not (logits._is_view() or logits.is_leaf):
        out: Tensor = _MaskInPlace.apply(logits, max(0, num_columns))  # type: ignore[no-untyped-call]
        return out
    columns = torch.arange(logits.shape[1], device=logits.device)
    return logits.masked_fill(columns >= num_columns, -math.inf)
