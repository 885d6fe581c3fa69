"""Pictures: the curve of a run's loss, its mixture, the strata of its lengths, its balance."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastrata.step.records import losses_by_set, losses_by_source
from elastrata_pipelines.storage import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK = "#1f2933"
"""Titles, labels."""
QUIET = "#7b8794"
"""Ticks, notes."""
GRID = "#e4e7eb"
BLUE = "#1769aa"
"""What a picture is about."""
PALE_BLUE = "#b8d4ee"
"""The same, unsmoothed or given up."""
RED = "#d1495b"
"""What to look at first: held-out losses, the best trial."""
GRAY = "#9aa5b1"
"""What came to nothing."""


Ints = npt.NDArray[np.int64]
_RAW, _SMOOTH, _HELD_OUT = PALE_BLUE, BLUE, RED
_STRATA = 8
_MOST_BARS = 128
_TALL = 3
"""A bar more than this many times as high as the next one is cut off, its height written beside."""
_LEAST_PERCENT = 0.001
"""Workers that differ by less are drawn as if by this much: logarithms know no zero."""
_TICKS_APART = 1.4
"""Ticks on a logarithmic axis are at least this factor apart, so that their labels are."""
_NAMED = ("o", "s", "D")
_INCHES, _DOTS_PER_INCH = (8.0, 4.5), 160


def loss_curve(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws `loss_figure` into a PNG file."""
    save(loss_figure(records), path)


def loss_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """The training loss, and the held-out loss where there is one, over the steps.

    Args:
        records: a value per step with `step` and `loss` (training) or `eval_loss` (held-out).
    """
    figure, axes = canvas("Loss", "optimizer step", "loss (nats)")
    steps = np.array([record["step"] for record in records if "loss" in record])
    losses = np.array([record["loss"] for record in records if "loss" in record], dtype=float)
    axes.plot(steps, losses, color=_RAW, linewidth=1, label="training, each step")
    if len(steps) >= 20:
        window = max(5, len(steps) // 50)
        axes.plot(steps, smoothed(losses, window), color=_SMOOTH, linewidth=2,
                  label=f"training, mean of {window} steps")  # fmt: skip
    held_out = [(r["step"], r["eval_loss"]) for r in records if "eval_loss" in r]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), color=_HELD_OUT, linewidth=2, marker="o",
                  markersize=5, label="held-out")  # fmt: skip
        step, loss = held_out[-1]
        axes.annotate(f"{loss:.2f}", (step, loss), xytext=(6, 6), textcoords="offset points",
                      color=_HELD_OUT, fontweight="bold")  # fmt: skip
    axes.legend(frameon=False, labelcolor=INK)
    axes.margins(x=0.02)
    return figure


def sparsity_curves(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the share of zeros over the steps, of all sparse layers together and of the layers with
    most and fewest.

    Args:
        steps: records with `step` and, where it changed, `layer_sparsity`.
        path: PNG file to write.
    """
    figure, axes = canvas("Weights at zero", "optimizer step", "share of a layer's weights (%)")
    shares: list[tuple[float, float, float]] = []
    for record in steps:
        is_sparse = record.get("flops_of_zeros", 0) > 0
        told = [100 * share for share in record.get("layer_sparsity", {}).values()]
        if told:
            shares.append((min(told), sum(told) / len(told), max(told)))
        else:
            shares.append(shares[-1] if is_sparse and shares else (0.0, 0.0, 0.0))
    places = [record["step"] for record in steps]
    least, mean, most = zip(*shares, strict=True)
    axes.fill_between(places, least, most, step="mid", color=_RAW, label="fewest to most zeros")
    axes.step(places, mean, where="mid", color=_SMOOTH, linewidth=2, label="mean over the layers")
    axes.set_ylim(-2, 102)
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def flops_curves(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the FLOPs of a run so far over the steps, with and without products with zeros.

    Args:
        steps: records with `step`, `flops` and `flops_of_zeros`.
        path: PNG file to write.
    """
    places = [record["step"] for record in steps]
    total = sum(float(record["flops"]) for record in steps)
    power = 3 * int(math.log10(max(1.0, total)) // 3)
    unit = f"FLOPs so far ($10^{{{power}}}$)"
    figure, axes = canvas("FLOPs, forward and backward", "optimizer step", unit)
    dense = np.cumsum([float(record["flops"]) / 10**power for record in steps])
    zeros = np.cumsum([record.get("flops_of_zeros", 0) / 10**power for record in steps])
    axes.plot(places, dense, color=QUIET, linewidth=2, label="dense")
    axes.plot(places, dense - zeros, color=_SMOOTH, linewidth=2, label="without zeros")
    axes.annotate(f"{dense[-1] / (dense - zeros)[-1]:.2f} times fewer",
                  (places[-1], (dense - zeros)[-1]), xytext=(0, -60), ha="right",
                  textcoords="offset points", color=_SMOOTH, fontweight="bold")  # fmt: skip
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def length_strata(histogram: Sequence[int], path: Path) -> None:
    """Draws how many samples have which length, coloured by stratum: bands of equally many tokens.

    Args:
        histogram: `histogram[s]` is the number of samples of s tokens.
        path: PNG file to write.
    """
    counts = np.asarray(histogram, dtype=np.int64)
    tokens = counts * np.arange(len(counts))
    num_samples, num_tokens = int(counts.sum()), int(tokens.sum())
    title = f"Lengths of {num_samples:,} samples, {num_tokens:,} tokens"
    figure, axes = canvas(title, "tokens in a sample", "samples")
    middle = np.cumsum(tokens) - tokens / 2
    strata = np.minimum(_STRATA - 1, middle * _STRATA // max(1, num_tokens)).astype(int)
    _draw_bars(axes, counts, strata)
    mean = num_tokens / max(1, num_samples)
    axes.axvline(mean, color=_HELD_OUT, linewidth=1.5)
    axes.annotate(f"mean {mean:.0f}", (mean, 0.97), xycoords=("data", "axes fraction"),
                  xytext=(5, 0), textcoords="offset points", va="top", color=_HELD_OUT)  # fmt: skip
    axes.text(0.0, -0.2, f"Colours: {_STRATA} length strata of equally many tokens.",
              transform=axes.transAxes, color=QUIET, fontsize=9)  # fmt: skip
    axes.set_xlim(0, len(counts))
    save(figure, path)


def imbalance_curves(curves: Mapping[str, Mapping[int, float]], path: Path) -> None:
    """Draws by how much the slowest worker's work exceeds the mean, over the number of workers.

    A single worker is the mean, and is not drawn: there must be other numbers of workers.

    Args:
        curves: by scheme, the largest work of a worker over the mean for each number of workers.
            The first one is drawn bold.
        path: PNG file to write.
    """
    from matplotlib import colormaps

    title = "Work of the slowest worker, above the mean"
    figure, axes = canvas(title, "workers", "above the mean (%)")
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, max(1, len(curves) - 1)))
    for number, (name, curve) in enumerate(curves.items()):
        sizes = sorted(size for size in curve if size > 1)
        percents = [max(_LEAST_PERCENT, 100 * (curve[size] - 1)) for size in sizes]
        axes.plot(sizes, percents, label=name, marker="o", markersize=4 if number else 6,
                  linewidth=1.5 if number else 3, zorder=2 if number else 3,
                  color=colors[number - 1] if number else _HELD_OUT)  # fmt: skip
    _logarithmic(axes, sorted({size for curve in curves.values() for size in curve} - {1}))
    axes.legend(frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def layout_cloud(
    layouts: Sequence[tuple[float, float, int]],
    named: Sequence[tuple[float, float, str]],
    memory: float,
    path: Path,
) -> None:
    """Draws the rate of layouts over the memory they need.

    Args:
        layouts: GiB, tokens per second and pipeline stages of each.
        named: GiB, tokens per second and name of at most three that are named, in order.
        memory: GiB of a device.
        path: PNG file to write.
    """
    from matplotlib import colormaps

    figure, axes = canvas("Layouts that fit", "GiB on the fullest device", "tokens/s")
    clouds = []
    stages = sorted({stage for _, _, stage in layouts})
    for number, stage in enumerate(stages):
        xs = [x for x, _, own in layouts if own == stage]
        ys = [y for _, y, own in layouts if own == stage]
        color = colormaps["viridis"](0.1 + 0.8 * number / max(1, len(stages) - 1))
        clouds.append(axes.scatter(xs, ys, s=9, color=color, linewidths=0,
                                   label=f"{stage} stage{'s' * (stage > 1)}"))  # fmt: skip
    device = axes.axvline(memory, color=_HELD_OUT, linewidth=1.5, label="a device's memory")
    # Named below: those worth a name lie close together, and so would what is written beside them.
    handles = [
        axes.scatter(x, y, s=70, marker=marker, facecolors="none", edgecolors=INK, linewidths=1.3,
                     zorder=4, label=f"{number}. {name}")
        for number, ((x, y, name), marker) in enumerate(zip(named, _NAMED, strict=False), start=1)
    ]  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.legend(handles=[*clouds, device], frameon=False, labelcolor=INK, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
    figure.legend(handles=handles, frameon=False, labelcolor=INK, loc="outside lower left",
                  fontsize=9)  # fmt: skip
    save(figure, path)


def workers_over_time(sizes: Sequence[tuple[float, int]], seconds: float, path: Path) -> None:
    """Draws how many workers compute.

    Args:
        sizes: since when, in seconds, and how many.
        seconds: when the run ended.
        path: PNG file to write.
    """
    figure, axes = canvas("Workers", "hours", "workers that compute")
    hours = [since / 3600 for since, _ in sizes] + [seconds / 3600]
    counts = [size for _, size in sizes]
    axes.step(hours, [*counts, counts[-1]] if counts else [0], where="post", color=_SMOOTH,
              linewidth=1)  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    save(figure, path)


def _logarithmic(axes: Axes, sizes: Sequence[int]) -> None:
    """Both axes logarithmic, with a tick for the largest size and all that leave it room."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    ticks: list[int] = []
    for size in reversed(sizes):
        if not ticks or size * _TICKS_APART <= ticks[-1]:
            ticks.append(size)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _draw_bars(axes: Axes, counts: Ints, strata: Ints) -> None:
    """A bar for every length, or for every few of many, each in the colour of its stratum."""
    from matplotlib import colormaps

    colors = colormaps["viridis"](np.linspace(0.12, 0.88, _STRATA))
    width = math.ceil(max(1, len(counts) - 1) / _MOST_BARS)
    starts = np.arange(0, len(counts), width)
    heights = np.add.reduceat(counts, starts)
    for start, height in zip(starts, heights, strict=True):
        stratum = strata[start + int(np.argmax(counts[start : start + width]))]
        axes.bar(start, height, width * 0.92, align="edge", color=colors[stratum])
    *_, second, tallest = sorted([0, *heights.tolist()])
    if tallest > _TALL * second > 0:
        # Samples cut at seq_len: their bar would flatten all the others.
        axes.set_ylim(0, _TALL * second / 2)
        place = int(starts[int(np.argmax(heights))])
        axes.annotate(f"{tallest:,} \u2191", (place, 1), xycoords=("data", "axes fraction"),
                      xytext=(-4, -4), textcoords="offset points", ha="right", va="top",
                      color=INK)  # fmt: skip


def canvas(title: str, x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """An empty plot in the house style, without a display and without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=INK, fontsize=13, fontweight="bold", pad=12)
    axes.set_xlabel(x_label, color=QUIET)
    axes.set_ylabel(y_label, color=QUIET)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    return figure, axes


def smoothed(values: npt.NDArray[np.float64], window: int) -> Any:
    """The mean of the last `window` values at every place; of fewer at the start."""
    sums = np.cumsum(values)
    sums[window:] = sums[window:] - sums[:-window]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture into a PNG file, whose folder is made where it is missing."""
    path = path if path.suffix else path.with_suffix(".png")  # as matplotlib would
    stream = io.BytesIO()
    figure.savefig(stream, format=path.suffix[1:])
    write_whole(path, stream.getvalue())


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
