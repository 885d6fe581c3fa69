"""How micro-batches pass through a model: one after the other, or through the stages of a
pipeline (`pipeline.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from typing_extensions import override

from elastrata.parallel.parallelize import GradientSync, begin_rounds, synchronize_gradients
from elastrata.workload.batch import Batch
from elastrata.workload.workload import Loss, Workload


class ForwardBackward(Protocol):
    """Runs a model over this rank's micro-batches of a step."""

    def ready(self, batches: Sequence[Batch]) -> list[Batch]:
        """Prepares micro-batches for the model."""
        return list(batches)

    def train(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, rounds: int
    ) -> list[Loss]:
        """Forward and backward; gradients are then summed over all ranks. Collective.

        Args:
            batches: from `ready`; all ranks have equally many.
            weights: per loss term the weight of the *global* batch.
            rounds: the gradient is reduced so many times, after equally many micro-batches each.

        Returns:
            What sums up to this rank's losses, detached.
        """

    def evaluate(self, batches: Sequence[Batch]) -> list[Loss]:
        """Forward only. Collective; the model trains on after it."""

    def recomputes(self, share: float) -> None:
        """From now on blocks compute so much of their forward pass again in the backward pass."""

    def synchronizes(self, when: GradientSync) -> None:
        """From now on gradients are summed over ranks then."""

    def figures(self) -> Mapping[str, Any]:
        """Fields of the `StepRecord` of the last step."""
        return {}


class WholeModel(ForwardBackward):
    """A model that every rank has all blocks of."""

    def __init__(
        self, model: nn.Module, workload: Workload, gradient_sync: GradientSync = "step"
    ) -> None:
        self._model = model
        self._workload = workload
        self._gradient_sync = gradient_sync

    @override
    def train(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, rounds: int
    ) -> list[Loss]:
        begin_rounds(self._model, rounds)
        per_round = len(batches) // rounds
        losses = []
        for number, batch in enumerate(batches):
            is_last = (number + 1) % per_round == 0
            wanted = is_last or self._gradient_sync == "micro_batch"
            synchronize_gradients(self._model, wanted, is_last=is_last)
            loss = self._workload.loss(self._model, batch)
            weighted(loss, weights).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detached())
        return losses

    @override
    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> list[Loss]:
        self._model.eval()
        losses = [self._workload.loss(self._model, batch) for batch in batches]
        self._model.train()
        return losses

    @override
    def recomputes(self, share: float) -> None:
        pass

    @override
    def synchronizes(self, when: GradientSync) -> None:
        self._gradient_sync = when


def weighted(loss: Loss, weights: Mapping[str, float]) -> torch.Tensor:
    """A micro-batch's share in the global batch's loss; a term without weight adds nothing."""
    shares = [total / max(weights[term], 1.0) for term, total in loss.terms.items()]
    return torch.stack(shares).sum()
