"""One optimizer step, equal at any world size: sums that are divided once by global weights."""

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


def do_nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class StepLoss:
    """Loss of a global batch: means over all its predictions."""

    total: float
    terms: Mapping[str, float]
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, apart from the updated model."""

    loss: StepLoss
    gradient_norm: float
    """The norm that `Clip.after_backward` returns."""
    skipped: bool
    """Loss or gradient were not finite, and nothing was updated. Equal on every rank."""
    seconds_in_model: float
    seconds_in_optimizer: float
    more: Sequence[float] = ()
    """Further sums that were reduced with the losses."""


class StepHooks:
    """Additions to a step; none by default. All methods are collective."""

    def changes_before(self, step: int) -> bool:
        """Return whether `before_step` of that step changes weights or the optimizer's state."""
        return False

    def before_step(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """Run before the first forward pass."""

    def before_clip(self, optimizer: torch.optim.Optimizer, *, finite: Tensor) -> None:
        """Run after the backward passes.

        Args:
            optimizer: over the model's parameters.
            finite: whether the step's loss is finite, a scalar on its device. Reading it
                synchronises.
        """

    def after_update(self) -> None:
        """Run after the optimizer's update.

        On a GPU it also runs if the update was skipped because loss or gradient are not finite. It
        must then change nothing.
        """

    def figures(self, tokens: int) -> Mapping[str, Any]:
        """Return fields for the `StepRecord` of a step of `tokens` tokens."""
        return {}


def reduce_sums(sums: Mapping[str, float], *, is_primary: bool = True) -> dict[str, float]:
    """Sum named numbers over all primary ranks in float64, exactly for whole numbers below 2^53.

    All ranks must pass the same keys, and get the same sums.
    """
    names = sorted(sums)
    # In main memory, through gloo: the host need not wait for a GPU.
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
    before_change: Callable[[], None] = do_nothing,
) -> StepResult:
    """Run forward, backward and update over this rank's micro-batches of one global batch.

    Loss and gradient norm are those of the global batch, so all ranks agree whether they are
    finite. If they are not, nothing is updated.

    Args:
        forward_backward: runs the model.
        optimizer: over the model's parameters.
        batches: this rank's micro-batches from `ready`, the same number on all ranks.
        weights: weight of the *global* batch by loss term.
        clip: clips the gradient of the same model.
        rounds: number of gradient reductions, after the same number of micro-batches each.
        is_primary: whether this rank's sums over samples count, as in `DataRank`.
        hooks: additions to the step; None: no additions.
        more: returns further numbers to sum over all ranks in the message of the losses: float64,
            shape [n], on their device. Called after the backward passes.
        before_change: called before weights or the optimizer's state may change.
    """
    hooks = hooks or StepHooks()
    stopwatch = _ModelStopwatch(device := _device_of(optimizer))
    clip.before_backward(share_of(batches, weights))
    losses = forward_backward.train(batches, weights, rounds=rounds)
    sums = loss_sums(losses)
    reduced_sums = _all_reduce(sums.values, is_primary, more() if more else None)
    stopwatch.out_of_model()
    loss_is_finite = sums.terms_of(reduced_sums).sum().isfinite()
    before_change()
    hooks.before_clip(optimizer, finite=loss_is_finite)
    gradient_norm = clip.after_backward().detach()
    finite = loss_is_finite & gradient_norm.isfinite()
    # One copy for all numbers of the step, so that the host waits for the device once.
    readback = Readback(
        torch.cat([reduced_sums, torch.stack([gradient_norm.double(), finite.double()])])
    )
    if skips_on_device(optimizer, device):
        # The host launches the update before it knows whether it is applied, so the device never
        # idles.
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
    """Return whether the device itself skips the update if loss or gradient are not finite.

    PyTorch's fused kernels do so, by the flag that its gradient scaler sets for them.
    """
    return device.type == "cuda" and all(
        group.get("fused", False) for group in optimizer.param_groups
    )


class _ModelStopwatch:
    """Measures the seconds of a step in the model and after it."""

    def __init__(self, device: torch.device) -> None:
        self._begin_seconds = time.perf_counter()
        # A GPU's time must be measured on the device: the host only launches its work, and is done
        # early.
        self._span = DeviceSpan() if device.type == "cuda" else None
        self._in_model = 0.0

    def out_of_model(self) -> None:
        """Mark the end of the passes and their losses."""
        self._in_model = time.perf_counter() - self._begin_seconds
        if self._span:
            self._span.end()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds in the model, and those after it until now.

        Call it once the step's numbers are read.
        """
        seconds = time.perf_counter() - self._begin_seconds
        in_model = self._span.seconds if self._span else self._in_model
        return in_model, max(0.0, seconds - in_model)


def _device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    parameter: Tensor = optimizer.param_groups[0]["params"][0]
    return parameter.device


def share_of(batches: Sequence[Batch], weights: Mapping[str, float]) -> float:
    """Return the share, 0 to 1, of these micro-batches in the weight of the global batch.

    It is the mean over the loss terms that have weight. The shares of all ranks add up to 1.
    """
    shares = [
        sum(batch.weights.get(term, 0.0) for batch in batches) / total
        for term, total in weights.items()
        # Losses of sources are only reported and are not part of the training loss.
        if total > 0 and not term.startswith(SOURCE_LOSS)
    ]
    return sum(shares) / len(shares) if shares else 0.0


def total_weights(batches: Sequence[Batch]) -> dict[str, float]:
    """Return the weight of these micro-batches together, by loss term."""
    weights: dict[str, float] = {}
    for batch in batches:
        for term, weight in batch.weights.items():
            weights[term] = weights.get(term, 0.0) + weight
    return weights


@dataclass(frozen=True)
class LossSums:
    """Sums over micro-batches of all terms and metrics of a loss."""

    keys: Sequence[tuple[str, str]]
    """Pairs of `metric` or `term` and a name, sorted, so that terms are last."""
    per: Mapping[tuple[str, str], str]
    """Loss term by whose weight each sum is divided."""
    values: Tensor
    """Sums in the order of `keys`, float64."""

    def terms_of(self, added_up: Tensor) -> Tensor:
        """Return the sums of the loss terms from sums over all ranks. Further numbers may
        follow."""
        first = sum(kind != "term" for kind, _ in self.keys)
        return added_up[first : len(self.keys)]

    def means(self, added_up: Sequence[float], weights: Mapping[str, float]) -> StepLoss:
        """Return the means over the global batch from sums over all ranks."""
        means: dict[str, dict[str, float]] = {"term": {}, "metric": {}}
        for (kind, name), value in zip(self.keys, added_up, strict=False):
            weight = weights[self.per[kind, name]]
            # The loss of a source without predictions in the batch is undefined, not zero.
            if weight or not name.startswith(SOURCE_LOSS):
                means[kind][name] = value / max(weight, 1.0)
        terms = means["term"]
        return StepLoss(total=sum(terms.values()), terms=terms, metrics=means["metric"])


def loss_sums(losses: Sequence[Loss]) -> LossSums:
    """Sum the losses of micro-batches, without reading them from the device."""
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
    """Return the means over the global batch, from the sums of all primary ranks. Collective."""
    sums = loss_sums(losses)
    return sums.means(Readback(_all_reduce(sums.values, is_primary)).wait(), weights)


def _all_reduce(sums: Tensor, is_primary: bool, more: Tensor | None = None) -> Tensor:
    """Return sums over samples of all primary ranks, followed by sums of `more` over all ranks."""
    # Other ranks of a data rank have the same samples, which must count once.
    values = sums if is_primary else torch.zeros_like(sums)
    if more is not None:
        # One message instead of two.
        values = torch.cat([values, more])
    if dist.is_initialized():
        dist.all_reduce(values)
    return values
