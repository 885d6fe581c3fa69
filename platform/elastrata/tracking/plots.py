"""Plots: losses, mixtures, length strata, load balance, layouts and numbers of workers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elastrata.step.records import losses_by_set, losses_by_source
from elastrata_pipelines.storage import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK = "#1f2933"
"""Titles and labels."""
QUIET = "#7b8794"
"""Ticks and notes."""
GRID = "#e4e7eb"
BLUE = "#1769aa"
"""The main subject of a plot."""
PALE_BLUE = "#b8d4ee"
"""The main subject unsmoothed or abandoned."""
RED = "#d1495b"
"""What to look at first: held-out losses, the best trial."""
GRAY = "#9aa5b1"
"""Failed trials and the like."""


Ints = npt.NDArray[np.int64]
_RAW, _SMOOTH, _HELD_OUT = PALE_BLUE, BLUE, RED
_STRATA = 8
_MOST_BARS = 128
_TALL = 3
"""A bar more than this factor higher than the next one is cut off and labelled with its height."""
_LEAST_PERCENT = 0.001
"""Smallest imbalance drawn on the logarithmic axis."""
_TICKS_APART = 1.4
"""Smallest ratio of neighbouring ticks on a logarithmic axis, so that labels do not overlap."""
_NAMED = ("o", "s", "D")
_INCHES, _DOTS_PER_INCH = (8.0, 4.5), 160


def loss_curve(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw `loss_figure` into a PNG file."""
    save(loss_figure(records), path)


def loss_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Return a plot of the training loss, and of any held-out loss, over the steps.

    Args:
        records: dicts with `step` and `loss` (training) or `eval_loss` (held-out).
    """
    figure, axes = canvas("Loss", "optimizer step", "loss (nats)")
    steps = np.array([record["step"] for record in records if "loss" in record])
    losses = np.array([record["loss"] for record in records if "loss" in record], dtype=float)
    axes.plot(steps, losses, color=_RAW, linewidth=1, label="training, each step")
    # A mean over at least 5 of fewer steps would hide the curve instead of smoothing it.
    if len(steps) >= 20:
        window = max(5, len(steps) // 50)
        axes.plot(steps, moving_average(losses, window), color=_SMOOTH, linewidth=2,
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
    """Draw the share of zeros over the steps: mean, minimum and maximum over the sparse layers.

    Args:
        steps: records with `step` and, if it changed, `layer_sparsity`.
        path: PNG file to write.
    """
    figure, axes = canvas("Weights at zero", "optimizer step", "share of a layer's weights (%)")
    shares: list[tuple[float, float, float]] = []
    for record in steps:
        is_sparse = record.get("flops_of_zeros", 0) > 0
        percents = [100 * share for share in record.get("layer_sparsity", {}).values()]
        if percents:
            shares.append((min(percents), sum(percents) / len(percents), max(percents)))
        else:
            # Records have `layer_sparsity` only if it changed: repeat the last value while it is
            # sparse.
            shares.append(shares[-1] if is_sparse and shares else (0.0, 0.0, 0.0))
    places = [record["step"] for record in steps]
    least, mean, most = zip(*shares, strict=True)
    axes.fill_between(places, least, most, step="mid", color=_RAW, label="fewest to most zeros")
    axes.step(places, mean, where="mid", color=_SMOOTH, linewidth=2, label="mean over the layers")
    axes.set_ylim(-2, 102)
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def flops_curves(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the cumulative FLOPs over the steps, with and without multiplications by zero.

    Args:
        steps: records with `step`, `flops` and `flops_of_zeros`.
        path: PNG file to write.
    """
    places = [record["step"] for record in steps]
    total = sum(float(record["flops"]) for record in steps)
    # Units of 10^3, 10^6, ...: counts of up to 10^24 would not fit on the axis.
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
    """Draw a histogram of sample lengths, coloured by stratum: bands with equal numbers of tokens.

    Args:
        histogram: `histogram[s]` is the number of samples of s tokens.
        path: PNG file to write.
    """
    counts = np.asarray(histogram, dtype=np.int64)
    tokens = counts * np.arange(len(counts))
    num_samples, num_tokens = int(counts.sum()), int(tokens.sum())
    title = f"Lengths of {num_samples:,} samples, {num_tokens:,} tokens"
    figure, axes = canvas(title, "tokens in a sample", "samples")
    # A length belongs to the stratum that contains the middle of its tokens.
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
    """Draw how far the slowest worker's work exceeds the mean, over the number of workers.

    Args:
        curves: by scheme, the largest work of a worker divided by the mean, for each number of
            workers. At least one number must exceed 1. The first scheme is drawn bold.
        path: PNG file to write.
    """
    from matplotlib import colormaps

    title = "Work of the slowest worker, above the mean"
    figure, axes = canvas(title, "workers", "above the mean (%)")
    colors = colormaps["viridis"](np.linspace(0.05, 0.9, max(1, len(curves) - 1)))
    for number, (name, curve) in enumerate(curves.items()):
        # With one worker the slowest is the mean, and log(0) cannot be drawn.
        sizes = sorted(size for size in curve if size > 1)
        # A logarithmic axis cannot show 0.
        percents = [max(_LEAST_PERCENT, 100 * (curve[size] - 1)) for size in sizes]
        axes.plot(sizes, percents, label=name, marker="o", markersize=4 if number else 6,
                  linewidth=1.5 if number else 3, zorder=2 if number else 3,
                  color=colors[number - 1] if number else _HELD_OUT)  # fmt: skip
    _make_logarithmic(axes, sorted({size for curve in curves.values() for size in curve} - {1}))
    axes.legend(frameon=False, labelcolor=INK, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)


def layout_cloud(
    layouts: Sequence[tuple[float, float, int]],
    named: Sequence[tuple[float, float, str]],
    memory: float,
    path: Path,
) -> None:
    """Draw the throughput of layouts over the memory that they need.

    Args:
        layouts: GiB, tokens per second and pipeline stages of each layout.
        named: GiB, tokens per second and name of at most three layouts to label, in order.
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
    # Labelled in a legend below, because the best layouts are too close together for labels.
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
    """Draw the number of computing workers over time.

    Args:
        sizes: times in seconds, each with the number of workers from then on.
        seconds: end of the run.
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


def _make_logarithmic(axes: Axes, sizes: Sequence[int]) -> None:
    """Make both axes logarithmic, with ticks at the largest size and at others far enough apart."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    # From the largest size down, as its label matters most.
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
    """Draw a bar for every length, or for every few lengths, in the colour of its stratum."""
    from matplotlib import colormaps

    colors = colormaps["viridis"](np.linspace(0.12, 0.88, _STRATA))
    width = math.ceil(max(1, len(counts) - 1) / _MOST_BARS)
    starts = np.arange(0, len(counts), width)
    heights = np.add.reduceat(counts, starts)
    for start, height in zip(starts, heights, strict=True):
        # A bar that covers several lengths has the colour of the most frequent one.
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
    """Return an empty figure and its axes in the house style."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # Without pyplot, which needs a display and has global state.
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


def moving_average(values: npt.NDArray[np.float64], window: int) -> Any:
    """Return the mean of the last `window` values at every index, of fewer values at the start."""
    sums = np.cumsum(values)
    # A running mean by differences of cumulative sums, in O(n).
    sums[window:] = sums[window:] - sums[:-window]
    return sums / np.minimum(np.arange(1, len(values) + 1), window)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file, creating its folder if necessary."""
    path = path if path.suffix else path.with_suffix(".png")  # as matplotlib would
    # Rendered to memory first, so that a failure leaves no partial file.
    stream = io.BytesIO()
    figure.savefig(stream, format=path.suffix[1:])
    write_atomically(path, stream.getvalue())


_MOST_POINTS = 400
"""Steps are grouped into at most this many points."""
Steps = Sequence[Mapping[str, Any]]


def share_curves(steps: Steps, path: Path) -> None:
    """Draw the share of each source in the tokens as stacked areas.

    Args:
        steps: records with `tokens` and `batch_tokens_by_source`.
        path: PNG file to write.
    """
    figure, axes = canvas("Sources", "tokens", "share of the tokens (%)")
    names, bins = _source_names(steps), _group_steps(steps)
    counts = np.array(
        [[sum(_tokens_of(step, name) for step in part) for part in bins] for name in names],
        dtype=float,
    )
    shares = 100 * counts / np.maximum(1, counts.sum(axis=0))
    places = [part[-1]["tokens"] for part in bins]
    axes.stackplot(places, shares, labels=names, colors=_shades(len(names)))
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, labelcolor=INK, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save(figure, path)


def source_losses(steps: Steps, path: Path) -> None:
    """Draw the smoothed training loss of each source.

    Args:
        steps: records with `tokens` and `metrics`.
        path: PNG file to write.
    """
    figure, axes = canvas("Loss by source", "tokens", "loss (nats)")
    names = _source_names(steps)
    for name, color in zip(names, _shades(len(names)), strict=True):
        key = f"loss/{name}"
        points = [
            (step["tokens"], step["metrics"][key])
            for step in steps
            if key in step.get("metrics", {})
        ]
        if points:
            places, losses = zip(*points, strict=True)
            curve = moving_average(np.array(losses, dtype=float), max(1, len(losses) // 50))
            axes.plot(places, curve, color=color, linewidth=2, label=f"{name} {curve[-1]:.2f}")
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def plot_held_out_losses(evaluations: Steps, path: Path) -> None:
    """Draw the held-out loss: overall, by source and on further sets.

    Args:
        evaluations: metrics by name, and `tokens`.
        path: PNG file to write.
    """
    figure, axes = canvas("Held-out losses", "tokens", "loss (nats)")
    _draw_held_out(axes, evaluations, lambda one: {"all": one["eval/loss"]}, _all_red, "-")
    _draw_held_out(axes, evaluations, losses_by_source, _shades, "-")
    _draw_held_out(axes, evaluations, losses_by_set, _shades, "--")
    axes.legend(frameon=False, labelcolor=INK)
    save(figure, path)


def _draw_held_out(
    axes: Any,
    evaluations: Steps,
    losses_of: Callable[[Mapping[str, float]], Mapping[str, float]],
    colors: Callable[[int], Sequence[str]],
    style: str,
) -> None:
    """Draw one curve for each name of a loss in the evaluations."""
    names = dict.fromkeys(name for one in evaluations for name in losses_of(one))
    for name, color in zip(names, colors(len(names)), strict=True):
        losses_at = [(one["tokens"], losses_of(one)) for one in evaluations]
        points = [(tokens, losses[name]) for tokens, losses in losses_at if name in losses]
        places, values = zip(*points, strict=True)
        axes.plot(places, values, color=color, linestyle=style, linewidth=2, marker="o",
                  markersize=4, label=f"{name} {values[-1]:.2f}")  # fmt: skip


def _source_names(steps: Steps) -> list[str]:
    """Return the names of all sources, in order of appearance."""
    # dict.fromkeys keeps the order of first appearance.
    return list(dict.fromkeys(name for step in steps for name in _tokens(step)))


def _tokens(step: Mapping[str, Any]) -> Mapping[str, int]:
    """Return a step's tokens by source; empty without sources."""
    found: Mapping[str, int] = step.get("batch_tokens_by_source") or {}
    return found


def _tokens_of(step: Mapping[str, Any], name: str) -> int:
    return _tokens(step).get(name, 0)


def _group_steps(steps: Steps) -> list[Steps]:
    """Group the steps that have sources."""
    mixed = [step for step in steps if _tokens(step)]
    size = -(-len(mixed) // _MOST_POINTS)
    return [mixed[first : first + size] for first in range(0, len(mixed), size)]


def _all_red(count: int) -> list[str]:
    return [RED] * count


def _shades(count: int) -> list[str]:
    """Return `count` colours from dark to pale blue."""
    dark, pale = (
        np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)])
        for color in (BLUE, PALE_BLUE)
    )
    mixed = [(dark + place * (pale - dark)).astype(int) for place in np.linspace(0, 1, count)]
    return ["#{:02x}{:02x}{:02x}".format(*color) for color in mixed]
