"""One optimizer step, equal at any world size: sums, divided once by global weights."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastrata.core.batch import Batch
from elastrata.core.clip import Clip
from elastrata.core.forward_backward import ForwardBackward
from elastrata.core.workload import Loss, Metric


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """The loss of a global batch: means over all its predictions."""

    total: float
    terms: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of a step, beside the changed model."""

    loss: StepLoss
    gradient_norm: float
    """The norm that `Clip.after_backward` returns."""
    skipped: bool
    """Loss or gradient were not finite, and nothing was updated. The same on every rank."""
    seconds_in_model: float
    seconds_in_optimizer: float


class StepHooks:
    """Additions to a step beside its passes, clipping and update: by default none. All methods are
    collective."""

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Before the first forward pass.

        Args:
            step: the run's, counted from 1.
            optimizer: over the model's parameters.
        """

    def before_clip(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """After the backward passes, once the loss is known.

        Args:
            optimizer: over the model's parameters.
            finite: whether the step's loss is.
        """

    def after_update(self) -> None:
        """After the optimizer has updated the parameters."""

    def figures(self, tokens: int) -> Mapping[str, Any]:
        """Fields of the `StepRecord` of a step of so many tokens."""
        return {}


def reduce_sums(
    sums: Mapping[str, float], device: torch.device, *, is_primary: bool = True
) -> dict[str, float]:
    """Adds up named numbers over all primary ranks; float64, exact for whole numbers below 2^53.

    All ranks must name the same keys, and all get the same sums.
    """
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=device)
    if not is_primary:
        values.zero_()
    if dist.is_initialized():
        dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))


def train_step(
    forward_backward: ForwardBackward,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    weights: Mapping[str, float],
    clip: Clip,
    rounds: int = 1,
    is_primary: bool = True,
    hooks: StepHooks | None = None,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches of one global batch.

    Loss and gradient norm are those of the global batch, so all ranks see alike whether they are
    finite; where they are not, nothing is updated.

    Args:
        forward_backward: through the model.
        optimizer: over its parameters.
        batches: this rank's micro-batches, made `ready`; all ranks have equally many.
        weights: per loss term the weight of the *global* batch.
        clip: of the same model's gradient.
        rounds: the gradient is reduced so many times, after equally many micro-batches each.
        is_primary: whether this rank's sums over samples are added up, as `DataRank` has it.
        hooks: what else is done; None: nothing.
    """
    hooks = hooks or StepHooks()
    started = time.perf_counter()
    clip.before_backward(share_of(batches, weights))
    losses = forward_backward.train(batches, weights, rounds=rounds)
    mean = mean_loss(losses, weights, is_primary=is_primary)
    in_optimizer = time.perf_counter()
    hooks.before_clip(optimizer, finite=math.isfinite(mean.total))
    gradient_norm = float(clip.after_backward())
    finite = math.isfinite(mean.total) and math.isfinite(gradient_norm)
    if finite:
        optimizer.step()
        hooks.after_update()
    optimizer.zero_grad()
    return StepResult(
        loss=mean,
        gradient_norm=gradient_norm,
        skipped=not finite,
        seconds_in_model=in_optimizer - started,
        seconds_in_optimizer=time.perf_counter() - in_optimizer,
    )


def share_of(batches: Sequence[Batch], weights: Mapping[str, float]) -> float:
    """The share of these micro-batches in the weight of the global batch, 0 to 1: the mean over
    the loss terms that have weight. Adds up to 1 over all ranks.

    Args:
        batches: this rank's.
        weights: per loss term the weight of the global batch.
    """
    shares = [
        sum(batch.weights.get(term, 0.0) for batch in batches) / total
        for term, total in weights.items()
        if total > 0
    ]
    return sum(shares) / len(shares) if shares else 0.0


def total_weights(batches: Sequence[Batch]) -> dict[str, float]:
    """Per loss term the weight of all these micro-batches."""
    weights: dict[str, float] = {}
    for batch in batches:
        for term, weight in batch.weights.items():
            weights[term] = weights.get(term, 0.0) + weight
    return weights


def mean_loss(
    losses: Sequence[Loss], weights: Mapping[str, float], *, is_primary: bool = True
) -> StepLoss:
    """The means over the global batch, from the sums of all primary ranks. Collective."""
    totals: dict[tuple[str, str], torch.Tensor] = {}
    per: dict[tuple[str, str], str] = {}
    for loss in losses:
        terms = {("term", term): Metric(total, per=term) for term, total in loss.terms.items()}
        metrics = {("metric", name): metric for name, metric in loss.metrics.items()}
        for key, metric in (terms | metrics).items():
            totals[key] = totals.get(key, 0) + metric.total.double()
            per[key] = metric.per
    keys = sorted(totals)
    device = next(iter(losses[0].terms.values())).device
    values = torch.stack([totals[key] for key in keys]).to(device)
    if not is_primary:
        values = torch.zeros_like(values)
    if dist.is_initialized():
        dist.all_reduce(values)
    means: dict[str, dict[str, float]] = {"term": {}, "metric": {}}
    for (kind, name), value in zip(keys, values.tolist(), strict=True):
        means[kind][name] = value / max(weights[per[kind, name]], 1.0)
    return StepLoss(total=sum(means["term"].values()), terms=means["term"], metrics=means["metric"])
