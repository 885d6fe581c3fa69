"""The loss of a model's predictions, and what is told beside it."""

from __future__ import annotations

from torch import Tensor

from elastrata.core.workload import Loss, Metric
from elastrata_workloads.unpadded.batch import UnpaddedBatch
from elastrata_workloads.unpadded.logits import cross_entropy
from elastrata_workloads.unpadded.sources import source_losses


def terms_of(term: str, z_loss: float) -> tuple[str, ...]:
    """The terms that every prediction counts in.

    Args:
        term: the cross entropy's.
        z_loss: its coefficient; 0: there is none.
    """
    return (term, "z") if z_loss else (term,)


def loss(term: str, logits: Tensor, batch: UnpaddedBatch, z_loss: float = 0.0) -> Loss:
    """Cross-entropy sum, in fp32 whatever the model computes in, and the number of right answers.

    Args:
        term: what it is called.
        logits: shape [P, V]; maybe divided over ranks.
        batch: what `logits` were computed from.
        z_loss: coefficient of the squared logarithm of each prediction's sum of exponentials.
    """
    with_each = batch.sources is not None
    found = cross_entropy(logits, batch.targets, with_squares=z_loss > 0, with_each=with_each)
    terms = {term: found.total}
    if found.squares is not None:
        terms["z"] = z_loss * found.squares
    by_source = source_losses(found.each, batch.sources, batch.source_names)
    return Loss(terms, {f"{term}_accuracy": Metric(found.num_right, per=term), **by_source})
