"""The pictures of a sweep: learning curves, the metric by key, parallel coordinates, importance."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from elastrata.sweeps.domains import Domain, LogUniform
from elastrata.sweeps.importance import importance
from elastrata.sweeps.scale import Scale
from elastrata.sweeps.standings import Standings, Trial
from elastrata.tracking.plots import BLUE, GRAY, GRID, INK, PALE_BLUE, QUIET, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = ("curves", "keys", "parallel", "importance")
_BEST, _FINISHED, _STOPPED, _BAD = RED, BLUE, PALE_BLUE, GRAY
_COLUMNS = 3
_MARGIN = 0.05


def draw(picture: str, standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """One of `PICTURES`, in the house style, without a display."""
    makers: dict[str, Callable[[Standings, Mapping[str, Domain]], Figure]] = {
        "curves": _curves,
        "keys": _keys,
        "parallel": _parallel,
        "importance": _importance,
    }
    return makers[picture](standings, space)


def png(figure: Figure) -> bytes:
    """The picture as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream)
    return stream.getvalue()


def importances(standings: Standings, space: Mapping[str, Domain]) -> dict[str, float]:
    """Importance by key, the largest first; of the trials that have a report."""
    sign = 1.0 if standings.mode == "min" else -1.0
    by_key = {}
    for key in space:
        trials = [t for t in standings.trials.values() if key in t.values and t.reports]
        results = [sign * t.value(standings.metric) if t.counts else math.nan for t in trials]
        by_key[key] = importance([t.values[key] for t in trials], results)
    return dict(sorted(by_key.items(), key=lambda item: -item[1]))


def _curves(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    figure = _figure(9.0, 5.0)
    axes = _axes(figure, 111, "Learning curves", "tokens", standings.metric)
    best = standings.best()
    scale = Scale.of(standings)
    for trial in standings.trials.values():
        tokens = [report.tokens for report in trial.reports]
        values = [report.value(standings.metric) for report in trial.reports]
        if not tokens:
            continue
        color, width = _look(trial, best)
        axes.plot(tokens, values, color=color, linewidth=width, zorder=3 if trial is best else 2)
        _mark(axes, scale, tokens[-1], trial, standings.metric, color, size=6)
    if best:
        last = best.reports[-1]
        axes.annotate(f"trial {best.id}: {last.value(standings.metric):.4g}",
                      (last.tokens, last.value(standings.metric)), xytext=(-6, -14),
                      textcoords="offset points", ha="right", color=_BEST,
                      fontweight="bold")  # fmt: skip
    scale.limit(axes)
    _legend(axes)
    _note(figure, scale.note(standings))
    return figure


def _keys(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """The metric against each key, a panel for each."""
    from matplotlib.ticker import NullFormatter

    rows = math.ceil(len(space) / _COLUMNS)
    columns = min(_COLUMNS, len(space))
    figure = _figure(4.2 * columns, 3.4 * rows)
    best = standings.best()
    scale = Scale.of(standings)
    for number, (key, domain) in enumerate(space.items(), start=1):
        axes = _axes(figure, (rows, columns, number), key, "", standings.metric)
        for trial in standings.trials.values():
            if key in trial.values and trial.reports:
                color, _ = _look(trial, best)
                x = _on_axis(domain, trial.values[key])
                size = 9 if trial is best else 6
                _mark(axes, scale, x, trial, standings.metric, color, size)
        if isinstance(domain, LogUniform):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        if _numeric(domain):
            _span(axes, domain)
        else:
            names = [str(value) for value in domain.extremes()]
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
        scale.limit(axes)
    _note(figure, scale.note(standings))
    return figure


def _parallel(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """A line for every trial, through its value on an axis for each key, to its result."""
    from matplotlib import colormaps

    figure = _figure(max(7.0, 1.8 * (len(space) + 1)), 5.0)
    axes = _axes(figure, 111, "Parallel coordinates", "", "")
    names = [*space, standings.metric]
    scale = Scale.of(standings)
    trials = [t for t in standings.trials.values() if math.isfinite(scale.shown(t, standings))]
    results = np.array([scale.shown(t, standings) for t in trials])
    low, high = (results.min(), results.max()) if len(results) else (0.0, 1.0)
    best = standings.best()
    for trial, result in zip(trials, results, strict=True):
        share = (result - low) / (high - low) if high > low else 0.5
        good = 1 - share if standings.mode == "min" else share
        places = [_place(space[key], trial.values.get(key)) for key in space]
        color = _BEST if trial is best else colormaps["viridis"](good)
        axes.plot(range(len(names)), [*places, share], color=color, alpha=0.9,
                  linewidth=3 if trial is best else 1.2, marker="o", markersize=3)  # fmt: skip
    for number, name in enumerate(names):
        ends = [low, high] if name == standings.metric else _ends(space[name])
        for height, end in zip((0.0, 1.0), ends, strict=True):
            text = f"{end:.3g}" if isinstance(end, float) else str(end)
            axes.annotate(text, (number, height), xytext=(0, -13 if height == 0 else 6),
                          textcoords="offset points", ha="center", color=QUIET,
                          fontsize=8)  # fmt: skip
        axes.axvline(number, color=GRID, zorder=0)
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set_yticks([])
    axes.set_ylim(-0.12, 1.12)
    _note(figure, scale.note(standings))
    return figure


def _importance(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    figure = _figure(8.0, 1.2 + 0.45 * len(space))
    title = f"Share of the differences in {standings.metric} that each key explains by itself"
    axes = _axes(figure, 111, title, "", "")
    by_key = importances(standings, space)
    names = list(reversed(by_key))
    axes.barh(names, [by_key[name] for name in names], color=BLUE, height=0.6)
    for number, name in enumerate(names):
        axes.annotate(f"{by_key[name]:.0%}", (by_key[name], number), xytext=(5, 0),
                      textcoords="offset points", va="center", color=INK)  # fmt: skip
    axes.set_xlim(0, 1.08)
    axes.set_xticks([])
    axes.grid(visible=False)
    return figure


def _look(trial: Trial, best: Trial | None) -> tuple[str, float]:
    """Colour and width of a trial's line."""
    if trial is best:
        return _BEST, 3.0
    if not trial.counts:
        return _BAD, 1.0
    return (_FINISHED, 1.5) if trial.state == "finished" else (_STOPPED, 1.5)


def _marker(trial: Trial) -> str:
    return {"finished": "o", "stopped": "s", "running": "."}.get(trial.state, "x")


def _legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    kinds = [
        ("best", _BEST, "o"),
        ("finished", _FINISHED, "o"),
        ("stopped early", _STOPPED, "s"),
        ("diverged or failed", _BAD, "x"),
    ]
    handles = [Line2D([], [], color=c, marker=m, label=name) for name, c, m in kinds]
    axes.legend(handles=handles, frameon=False, labelcolor=INK)


def _mark(
    axes: Axes, scale: Scale, x: Any, trial: Trial, metric: str, color: str, size: int
) -> None:
    """A trial's newest value: where it is, or as an arrow or a cross at the edge of the axis."""
    value = trial.value(metric)
    is_inside = math.isfinite(value) and not scale.is_beyond(value)
    arrow = ("^" if scale.sign > 0 else "v") if math.isfinite(value) and trial.counts else "x"
    marker = _marker(trial) if is_inside else arrow
    kind: dict[str, Any] = {
        "marker": marker,
        "color": color,
        "markersize": size,
        "linestyle": "none",
    }
    if is_inside:
        axes.plot(x, value, **kind)
    else:
        edge = 1.0 if scale.sign > 0 else 0.0
        across = axes.get_xaxis_transform()
        axes.plot([x], [edge], transform=across, clip_on=False, zorder=4, **kind)


def _note(figure: Figure, text: str) -> None:
    if text:
        figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color=QUIET)


def _on_axis(domain: Domain, value: Any) -> Any:
    """A value of a key as a number; a choice of words by its place."""
    if _numeric(domain):
        return value
    return [str(choice) for choice in domain.extremes()].index(str(value))


def _span(axes: Axes, domain: Domain) -> None:
    """From the smallest value of a domain to the largest, with a margin."""
    values = [float(str(value)) for value in domain.extremes()]
    low, high = min(values), max(values)
    if isinstance(domain, LogUniform):
        axes.set_xlim(low / (high / low) ** _MARGIN, high * (high / low) ** _MARGIN)
    elif high > low:
        axes.set_xlim(low - _MARGIN * (high - low), high + _MARGIN * (high - low))


def _numeric(domain: Domain) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in domain.extremes())


def _place(domain: Domain, value: Any) -> float:
    return math.nan if value is None else domain.share_of(value)


def _ends(domain: Domain) -> Sequence[Any]:
    extremes = domain.extremes()
    return [extremes[0], extremes[-1]]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure._repr_png_ = lambda: png(figure)  # type: ignore[attr-defined]  # what notebooks show
    return figure


def _axes(figure: Figure, place: Any, title: str, x_label: str, y_label: str) -> Axes:
    axes = figure.add_subplot(*place) if isinstance(place, tuple) else figure.add_subplot(place)
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(x_label, color=QUIET)
    axes.set_ylabel(y_label, color=QUIET)
    axes.grid(axis="y", color=GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=QUIET, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    return axes
