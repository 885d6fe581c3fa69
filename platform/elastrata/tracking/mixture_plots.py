"""Pictures of a mixture: the shares of its sources, and their losses, over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from elastrata.core.named_losses import losses_by_set, losses_by_source
from elastrata.tracking.colors import BLUE, INK, PALE_BLUE, RED
from elastrata.tracking.plots import canvas, save, smoothed

_MOST_POINTS = 400
"""Steps are put together to so many."""
Steps = Sequence[Mapping[str, Any]]


def share_curves(steps: Steps, path: Path) -> None:
    """Draws the share of each source in the tokens, one above the other.

    Args:
        steps: records with `tokens` and `batch_tokens_by_source`.
        path: PNG file to write.
    """
    figure, axes = canvas("Sources", "tokens", "share of the tokens (%)")
    names, bins = _names(steps), _bins(steps)
    counts = np.array(
        [[sum(_of(step, name) for step in part) for part in bins] for name in names], dtype=float
    )
    shares = 100 * counts / np.maximum(1, counts.sum(axis=0))
    places = [part[-1]["tokens"] for part in bins]
    axes.stackplot(places, shares, labels=names, colors=_shades(len(names)))
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)


def source_losses(steps: Steps, path: Path) -> None:
    """Draws the training loss of each source, smoothed.

    Args:
        steps: records with `tokens` and `metrics`.
        path: PNG file to write.
    """
    figure, axes = canvas("Loss by source", "tokens", "loss (nats)")
    names = _names(steps)
    for name, color in zip(names, _shades(len(names)), strict=True):
        key = f"loss/{name}"
        points = [
            (step["tokens"], step["metrics"][key])
            for step in steps
            if key in step.get("metrics", {})
        ]
        if points:
            places, losses = zip(*points, strict=True)
            curve = smoothed(np.array(losses, dtype=float), max(1, len(losses) // 50))
            axes.plot(places, curve, color=color, linewidth=2, label=f"{name} {curve[-1]:.2f}")
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def held_out_losses(evaluations: Steps, path: Path) -> None:
    """Draws the loss on the held-out data: of all of it, of every source, and on further sets.

    Args:
        evaluations: metrics by name, and `tokens`.
        path: PNG file to write.
    """
    figure, axes = canvas("Held-out losses", "tokens", "loss (nats)")
    _held_out_curves(axes, evaluations, lambda one: {"all": one["eval/loss"]}, _red, "-")
    _held_out_curves(axes, evaluations, losses_by_source, _shades, "-")
    _held_out_curves(axes, evaluations, losses_by_set, _shades, "--")
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def _held_out_curves(
    axes: Any,
    evaluations: Steps,
    losses_of: Callable[[Mapping[str, float]], Mapping[str, float]],
    colors: Callable[[int], Sequence[str]],
    style: str,
) -> None:
    """A curve for each name that evaluations tell a loss of."""
    names = dict.fromkeys(name for one in evaluations for name in losses_of(one))
    for name, color in zip(names, colors(len(names)), strict=True):
        told = [(one["tokens"], losses_of(one)) for one in evaluations]
        points = [(tokens, losses[name]) for tokens, losses in told if name in losses]
        places, values = zip(*points, strict=True)
        axes.plot(places, values, color=color, linestyle=style, linewidth=2, marker="o",
                  markersize=4, label=f"{name} {values[-1]:.2f}")  # fmt: skip


def _names(steps: Steps) -> list[str]:
    """All sources, in the order they come."""
    return list(dict.fromkeys(name for step in steps for name in _tokens(step)))


def _tokens(step: Mapping[str, Any]) -> Mapping[str, int]:
    found: Mapping[str, int] = step.get("batch_tokens_by_source") or {}
    return found


def _of(step: Mapping[str, Any], name: str) -> int:
    return _tokens(step).get(name, 0)


def _bins(steps: Steps) -> list[Steps]:
    """The steps that have sources, some together."""
    mixed = [step for step in steps if _tokens(step)]
    size = -(-len(mixed) // _MOST_POINTS)
    return [mixed[first : first + size] for first in range(0, len(mixed), size)]


def _red(count: int) -> list[str]:
    return [RED] * count


def _shades(count: int) -> list[str]:
    """From dark to pale."""
    dark, pale = (
        np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)])
        for color in (BLUE, PALE_BLUE)
    )
    mixed = [(dark + place * (pale - dark)).astype(int) for place in np.linspace(0, 1, count)]
    return ["#{:02x}{:02x}{:02x}".format(*color) for color in mixed]
