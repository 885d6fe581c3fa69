"""One optimizer step, equal at any world size: sums, divided once by global weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.device.device_transfer import DeviceSpan, Readback
from elastrata.step.clip import Clip
from elastrata.step.forward_backward import ForwardBackward
from elastrata.workload.batch import Batch
from elastrata.workload.workload import SOURCE_LOSS, Loss, Metric


def nothing() -> None:
    """Nothing is to be done."""


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
    more: Sequence[float] = ()
    """What else was added up with the losses."""


class StepHooks:
    """Additions to a step beside its passes, clipping and update: by default none. All methods are
    collective."""

    def changes_before(self, step: int) -> bool:
        """Whether `before_step` of that step changes weights or the optimizer's state."""
        return False

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Before the first forward pass."""

    def before_clip(self, optimizer: torch.optim.Optimizer, *, finite: Tensor) -> None:
        """After the backward passes.

        Args:
            optimizer: over the model's parameters.
            finite: whether the step's loss is; a scalar on its device, so that reading it waits.
        """

    def after_update(self) -> None:
        """After the optimizer has updated the parameters, or on a GPU would have if loss and
        gradient were finite: then this must change nothing."""

    def figures(self, tokens: int) -> Mapping[str, Any]:
        """Fields of the `StepRecord` of a step of so many tokens."""
        return {}


def reduce_sums(sums: Mapping[str, float], *, is_primary: bool = True) -> dict[str, float]:
    """Adds up named numbers over all primary ranks; float64, exact for whole numbers below 2^53.

    All ranks must name the same keys, and all get the same sums. They travel between main memories:
    no device is waited for.
    """
    names = sorted(sums)
    values = torch.tensor([sums[name] for name in names], dtype=torch.float64)
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
    more: Callable[[], Tensor] | None = None,
    before_change: Callable[[], None] = nothing,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches of one global batch.

    Loss and gradient norm are those of the global batch, so all ranks see alike whether they are
    finite; where they are not, nothing is updated. The host reads all numbers of the step at once.

    Args:
        forward_backward: through the model.
        optimizer: over its parameters.
        batches: this rank's micro-batches, made `ready`; all ranks have equally many.
        weights: per loss term the weight of the *global* batch.
        clip: of the same model's gradient.
        rounds: the gradient is reduced so many times, after equally many micro-batches each.
        is_primary: whether this rank's sums over samples are added up, as `DataRank` has it.
        hooks: what else is done; None: nothing.
        more: numbers of this rank that are added up over all ranks in the message of the losses,
            float64, shape [n], on their device; called after the backward passes.
        before_change: called before weights or the optimizer's state may change.
    """
    hooks = hooks or StepHooks()
    stopwatch = _ModelStopwatch(device := _device_of(optimizer))
    clip.before_backward(share_of(batches, weights))
    losses = forward_backward.train(batches, weights, rounds=rounds)
    sums = loss_sums(losses)
    added_up = _all_reduced(sums.values, is_primary, more() if more else None)
    stopwatch.out_of_model()
    loss_is_finite = sums.terms_of(added_up).sum().isfinite()
    before_change()
    hooks.before_clip(optimizer, finite=loss_is_finite)
    gradient_norm = clip.after_backward().detach()
    finite = loss_is_finite & gradient_norm.isfinite()
    readback = Readback(
        torch.cat([added_up, torch.stack([gradient_norm.double(), finite.double()])])
    )
    if skips_on_device(optimizer, device):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
        hooks.after_update()
        numbers = readback.wait()
    else:
        numbers = readback.wait()
        if numbers[-1]:
            optimizer.step()
            hooks.after_update()
    optimizer.zero_grad()
    *values, norm, is_finite = numbers
    in_model, in_optimizer = stopwatch.seconds()
    return StepResult(
        loss=sums.means(values, weights),
        gradient_norm=norm,
        skipped=not is_finite,
        seconds_in_model=in_model,
        seconds_in_optimizer=in_optimizer,
        more=values[len(sums.values) :],
    )


def skips_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the device itself leaves an update out where it finds that loss or gradient are not
    finite: then the host asks for the update before it knows, and does not keep the device waiting.

    PyTorch's fused kernels do, by the flag that its gradient scaler sets for them.
    """
    return device.type == "cuda" and all(
        group.get("fused", False) for group in optimizer.param_groups
    )


class _ModelStopwatch:
    """The seconds of a step, in the model and after it, on the device where it is a GPU: the host
    is done long before."""

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._span = DeviceSpan() if device.type == "cuda" else None
        self._in_model = 0.0

    def out_of_model(self) -> None:
        """The passes and their losses end here."""
        self._in_model = time.perf_counter() - self._began
        if self._span:
            self._span.end()

    def seconds(self) -> tuple[float, float]:
        """In the model, and from then until now; once the step's numbers are read."""
        seconds = time.perf_counter() - self._began
        in_model = self._span.seconds if self._span else self._in_model
        return in_model, max(0.0, seconds - in_model)


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    parameter: Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.device


def share_of(batches: Sequence[Batch], weights: Mapping[str, float]) -> float:
    """The share of these micro-batches in the weight of the global batch, 0 to 1: the mean over
    the loss terms that have weight. Adds up to 1 over all ranks."""
    shares = [
        sum(batch.weights.get(term, 0.0) for batch in batches) / total
        for term, total in weights.items()
        if total > 0 and not term.startswith(SOURCE_LOSS)
    ]
    return sum(shares) / len(shares) if shares else 0.0


def total_weights(batches: Sequence[Batch]) -> dict[str, float]:
    """Per loss term the weight of all these micro-batches."""
    weights: dict[str, float] = {}
    for batch in batches:
        for term, weight in batch.weights.items():
            weights[term] = weights.get(term, 0.0) + weight
    return weights


@dataclass(frozen=True)
class LossSums:
    """Sums over micro-batches of everything that a loss tells."""

    keys: Sequence[tuple[str, str]]
    """`metric` or `term`, and its name; sorted, so that terms are last."""
    per: Mapping[tuple[str, str], str]
    """The loss term whose weight each is divided by."""
    values: Tensor
    """In the order of the keys, float64."""

    def terms_of(self, added_up: Tensor) -> Tensor:
        """The sums of the loss terms among sums over all ranks, which may have more behind them."""
        first = sum(kind != "term" for kind, _ in self.keys)
        return added_up[first : len(self.keys)]

    def means(self, added_up: Sequence[float], weights: Mapping[str, float]) -> StepLoss:
        """The means over the global batch, from sums over all ranks."""
        means: dict[str, dict[str, float]] = {"term": {}, "metric": {}}
        for (kind, name), value in zip(self.keys, added_up, strict=False):
            weight = weights[self.per[kind, name]]
            if weight or not name.startswith(SOURCE_LOSS):
                means[kind][name] = value / max(weight, 1.0)
        terms = means["term"]
        return StepLoss(total=sum(terms.values()), terms=terms, metrics=means["metric"])


def loss_sums(losses: Sequence[Loss]) -> LossSums:
    """The sums of some micro-batches' losses; reads none."""
    totals: dict[tuple[str, str], Tensor] = {}
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
    return LossSums(keys, per, values)


def mean_loss(
    losses: Sequence[Loss], weights: Mapping[str, float], *, is_primary: bool = True
) -> StepLoss:
    """The means over the global batch, from the sums of all primary ranks. Collective."""
    sums = loss_sums(losses)
    return sums.means(_all_reduced(sums.values, is_primary).tolist(), weights)


def _all_reduced(sums: Tensor, is_primary: bool, more: Tensor | None = None) -> Tensor:
    """Sums over samples, added up over all primary ranks, then `more`, over all ranks."""
    values = sums if is_primary else torch.zeros_like(sums)
    if more is not None:
        values = torch.cat([values, more])
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
