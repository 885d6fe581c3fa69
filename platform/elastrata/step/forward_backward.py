"""Forward and backward passes over micro-batches: one after the other, or through a pipeline."""

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
        """Prepare micro-batches for the model."""
        return list(batches)

    def train(
        self, batches: Sequence[Batch], weights: Mapping[str, float], *, rounds: int
    ) -> list[Loss]:
        """Run forward and backward, and sum the gradients over all ranks. Collective.

        Args:
            batches: micro-batches from `ready`, the same number on all ranks.
            weights: weight of the *global* batch by loss term.
            rounds: number of gradient reductions, after the same number of micro-batches each.

        Returns:
            Detached losses whose sum is this rank's loss.
        """

    def evaluate(self, batches: Sequence[Batch]) -> list[Loss]:
        """Run forward only. Collective; training can continue after it."""

    def set_recomputation(self, share: float) -> None:
        """Set the share of their forward pass that blocks recompute in the backward pass."""

    def set_gradient_sync(self, when: GradientSync) -> None:
        """Set when gradients are summed over ranks."""

    def figures(self) -> Mapping[str, Any]:
        """Return fields for the `StepRecord` of the last step."""
        return {}


class WholeModel(ForwardBackward):
    """A model whose blocks are all on every rank, sharded or not."""

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
            synchronizes = is_last or self._gradient_sync == "micro_batch"
            synchronize_gradients(self._model, synchronizes, is_last=is_last)
            loss = self._workload.loss(self._model, batch)
            # Right after its forward pass, so that only one micro-batch's activations are in
            # memory.
            weighted_loss(loss, weights).backward()  # type: ignore[no-untyped-call]
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
    def set_recomputation(self, share: float) -> None:
        pass

    @override
    def set_gradient_sync(self, when: GradientSync) -> None:
        self._gradient_sync = when


def weighted_loss(loss: Loss, weights: Mapping[str, float]) -> torch.Tensor:
    """Return a micro-batch's share in the loss of the global batch, a scalar."""
    # A term without weight has a sum of zero; the maximum prevents a division by zero.
    shares = [total / max(weights[term], 1.0) for term, total in loss.terms.items()]
    return torch.stack(shares).sum()
