"""The names in a loss: with them, one rank's numbers are a loss on the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from elastrata.core.workload import Loss, Metric


@dataclass(frozen=True)
class LossNames:
    """The names in a loss, the same in every step."""

    terms: tuple[str, ...]
    metrics: tuple[tuple[str, str], ...]
    """Each with the loss term by whose weight it is divided."""

    @classmethod
    def of(cls, loss: Loss) -> LossNames:
        """Those of a loss."""
        metrics = tuple((name, metric.per) for name, metric in loss.metrics.items())
        return cls(tuple(loss.terms), metrics)

    def __len__(self) -> int:
        return len(self.terms) + len(self.metrics)

    def numbers(self, loss: Loss) -> list[Tensor]:
        """The sums in such a loss: terms, then metrics."""
        metrics = [loss.metrics[name].total for name, _ in self.metrics]
        return [*(loss.terms[term] for term in self.terms), *metrics]

    def loss(self, numbers: Tensor) -> Loss:
        """The loss with these sums, in that order; shape [n]."""
        terms, metrics = numbers[: len(self.terms)], numbers[len(self.terms) :]
        return Loss(
            dict(zip(self.terms, terms, strict=True)),
            {
                name: Metric(total, per)
                for (name, per), total in zip(self.metrics, metrics, strict=True)
            },
        )
