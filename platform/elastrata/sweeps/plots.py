"""The plots and the HTML report of a sweep."""

from __future__ import annotations

import base64
import html
import io
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import Standings, Trial
from elastrata.sweeps.result import PLOTS, REPORT_FILE
from elastrata.sweeps.space import Choice, Domain, Int, LogUniform, Uniform
from elastrata.tracking.plots import BLUE, GRAY, GRID, INK, PALE_BLUE, QUIET, RED
from elastrata.tracking.tracker import Tracker
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Share of an axis left free below the best value and, unless the axis is cut off, above the worst.
_ROOM = 0.12
_MOST_LISTED = 8
# Values that exceed the best by more than this many widths of the better half are drawn at the
# edge.
_OUTLIER = 3.0


@dataclass(frozen=True)
class Scale:
    """Range of the metric that plots show; values beyond it are drawn at the edge.

    Values much worse than the better half would otherwise flatten the rest of a plot.
    """

    sign: float
    """1 if small values of the metric are good, else -1."""
    ends: tuple[float, float] | None
    """The best and the worst value inside the range; None if the range holds all values."""

    @classmethod
    def of(cls, standings: Standings) -> Scale:
        """Return the scale for all reports of all trials."""
        sign = 1.0 if standings.mode == "min" else -1.0
        values = sorted(
            sign * report.value(standings.metric)
            for trial in standings.trials.values()
            for report in trial.reports
            if math.isfinite(report.value(standings.metric))
        )
        # The spread of the better half of fewer than four values says nothing.
        if len(values) < 4:
            return cls(sign, None)
        best, middle = values[0], values[len(values) // 2]
        worst = best + _OUTLIER * (middle - best)
        is_cut = middle > best and values[-1] > worst
        return cls(sign, (sign * best, sign * worst) if is_cut else None)

    def is_beyond(self, value: float) -> bool:
        """Return whether a value is drawn at the edge."""
        return self.ends is not None and self.sign * value > self.sign * self.ends[1]

    def shown(self, trial: Trial, standings: Standings) -> float:
        """Return the height at which a trial's newest value is drawn; NaN if it has no valid
        value."""
        value = trial.value(standings.metric) if trial.counts else math.nan
        return self.ends[1] if self.ends and self.is_beyond(value) else value

    def limit(self, axes: Axes) -> None:
        """Cut an axis off at the range, and leave room for the label below the best value."""
        axes.margins(y=_ROOM)
        if self.ends:
            best, worst = self.ends
            axes.set_ylim(*sorted((best - _ROOM * (worst - best), worst)))

    def note(self, standings: Standings) -> str:
        """Return a line about the trials that are drawn at the edge or not at all; empty if there
        are no such trials."""
        trials = standings.trials.values()
        beyond = [t.id for t in trials if t.counts and self.is_beyond(t.value(standings.metric))]
        without_value = [t.id for t in trials if t.is_over and not t.counts]
        parts = [
            *([f"beyond the axis, drawn at its edge: {_join_ids(beyond)}"] if beyond else []),
            *([f"diverged or failed: {_join_ids(without_value)}"] if without_value else []),
        ]
        return f"Trials {'; '.join(parts)}." if parts else ""


def _join_ids(ids: Sequence[str]) -> str:
    more = len(ids) - _MOST_LISTED
    return ", ".join(ids[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


PICTURES = ("curves", "keys", "parallel", "importance")
_BEST, _FINISHED, _STOPPED, _BAD = RED, BLUE, PALE_BLUE, GRAY
_COLUMNS = 3
_MARGIN = 0.05


def draw(picture: str, standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """Return one of the `PICTURES` in Elastrata's plot style. No display is needed."""
    makers: dict[str, Callable[[Standings, Mapping[str, Domain]], Figure]] = {
        "curves": _draw_curves,
        "keys": _draw_keys,
        "parallel": _draw_parallel,
        "importance": _draw_importance,
    }
    return makers[picture](standings, space)


def png(figure: Figure) -> bytes:
    """Return a figure as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream)
    return stream.getvalue()


def importances(standings: Standings, space: Mapping[str, Domain]) -> dict[str, float]:
    """Return Optuna's importance of every key that all trials have, the largest first.

    Computed with PED-ANOVA (Watanabe et al., arXiv 2304.10255) over the trials that have a report.
    The result is empty with fewer than two finite values.

    Raises:
        UserError: Optuna is not installed.
    """
    if find_spec("optuna") is None:
        raise UserError("importance: needs the package optuna; install it with pip install optuna")
    import optuna

    trials = [trial for trial in standings.trials.values() if trial.reports]
    values = [t.value(standings.metric) if t.counts else math.nan for t in trials]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return {}
    is_min = standings.mode == "min"
    # A diverged trial counts as the worst of the others, as Optuna accepts no NaN.
    worst = max(finite) if is_min else min(finite)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(direction="minimize" if is_min else "maximize")
    # A study is built from the journal, whichever searcher suggested the points.
    for trial, value in zip(trials, values, strict=True):
        distributions = {key: _build_distribution(space[key]) for key in trial.values}
        study.add_trial(
            optuna.trial.create_trial(
                params=trial.values,
                distributions=distributions,
                value=value if math.isfinite(value) else worst,
            )
        )
    with warnings.catch_warnings():
        # Optuna warns about few trials, which is normal for a sweep that has just begun.
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        shares = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: float(share) for key, share in shares.items()}


def _build_distribution(domain: Domain) -> Any:
    from optuna.distributions import (
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )

    match domain:
        case Choice():
            return CategoricalDistribution(domain.choice)
        case Int():
            return IntDistribution(*domain.int)
        case LogUniform():
            return FloatDistribution(*domain.loguniform, log=True)
        case Uniform():
            return FloatDistribution(*domain.uniform)


def _draw_curves(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    figure = _figure(9.0, 5.0)
    axes = _axes(figure, 111, "Learning curves", "tokens", standings.metric)
    best = standings.best()
    scale = Scale.of(standings)
    for trial in standings.trials.values():
        tokens = [report.tokens for report in trial.reports]
        values = [report.value(standings.metric) for report in trial.reports]
        # The trial has not been evaluated yet.
        if not tokens:
            continue
        color, width = _line_style(trial, best)
        axes.plot(tokens, values, color=color, linewidth=width, zorder=3 if trial is best else 2)
        _draw_value(axes, scale, tokens[-1], trial, standings.metric, color, size=6)
    if best:
        last = best.reports[-1]
        axes.annotate(f"trial {best.id}: {last.value(standings.metric):.4g}",
                      (last.tokens, last.value(standings.metric)), xytext=(-6, -14),
                      textcoords="offset points", ha="right", color=_BEST,
                      fontweight="bold")  # fmt: skip
    scale.limit(axes)
    _draw_legend(axes)
    _draw_note(figure, scale.note(standings))
    return figure


def _draw_keys(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """Draw the metric against each key, in one panel per key."""
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
                color, _ = _line_style(trial, best)
                x = _axis_position(domain, trial.values[key])
                size = 9 if trial is best else 6
                _draw_value(axes, scale, x, trial, standings.metric, color, size)
        if isinstance(domain, LogUniform):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(NullFormatter())
        if _is_numeric(domain):
            _set_limits(axes, domain)
        else:
            names = [str(value) for value in domain.extremes()]
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
        scale.limit(axes)
    _draw_note(figure, scale.note(standings))
    return figure


def _draw_parallel(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    """Draw a line for every trial through its value on one axis per key, to its result."""
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
        # A single result, or equal ones, get the middle colour.
        share = (result - low) / (high - low) if high > low else 0.5
        good = 1 - share if standings.mode == "min" else share
        places = [_domain_share(space[key], trial.values.get(key)) for key in space]
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
    _draw_note(figure, scale.note(standings))
    return figure


def _draw_importance(standings: Standings, space: Mapping[str, Domain]) -> Figure:
    figure = _figure(8.0, 1.2 + 0.45 * len(space))
    title = f"Importance of each key for a good {standings.metric} (Optuna, PED-ANOVA)"
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


def _line_style(trial: Trial, best: Trial | None) -> tuple[str, float]:
    """Return the colour and the width of a trial's line."""
    if trial is best:
        return _BEST, 3.0
    if not trial.counts:
        return _BAD, 1.0
    return (_FINISHED, 1.5) if trial.state == "finished" else (_STOPPED, 1.5)


def _marker(trial: Trial) -> str:
    return {"finished": "o", "stopped": "s", "running": "."}.get(trial.state, "x")


def _draw_legend(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    kinds = [
        ("best", _BEST, "o"),
        ("finished", _FINISHED, "o"),
        ("stopped early", _STOPPED, "s"),
        ("diverged or failed", _BAD, "x"),
    ]
    handles = [Line2D([], [], color=c, marker=m, label=name) for name, c, m in kinds]
    axes.legend(handles=handles, frameon=False, labelcolor=INK)


def _draw_value(
    axes: Axes, scale: Scale, x: Any, trial: Trial, metric: str, color: str, size: int
) -> None:
    """Draw a trial's newest value as a point, or as an arrow or a cross at the edge of the axis."""
    value = trial.value(metric)
    is_inside = math.isfinite(value) and not scale.is_beyond(value)
    arrow = ("^" if scale.sign > 0 else "v") if math.isfinite(value) and trial.counts else "x"
    marker = _marker(trial) if is_inside else arrow
    style: dict[str, Any] = {
        "marker": marker,
        "color": color,
        "markersize": size,
        "linestyle": "none",
    }
    if is_inside:
        axes.plot(x, value, **style)
    else:
        edge = 1.0 if scale.sign > 0 else 0.0
        # x in data coordinates, y as a share of the axis: the marker stays at the edge.
        across = axes.get_xaxis_transform()
        axes.plot([x], [edge], transform=across, clip_on=False, zorder=4, **style)


def _draw_note(figure: Figure, text: str) -> None:
    if text:
        figure.supxlabel(text, x=0.01, ha="left", fontsize=9, color=QUIET)


def _axis_position(domain: Domain, value: Any) -> Any:
    """Return the position of a key's value on its axis: its number, or the index of a choice."""
    if _is_numeric(domain):
        return value
    return [str(choice) for choice in domain.extremes()].index(str(value))


def _set_limits(axes: Axes, domain: Domain) -> None:
    """Set the limits of an x axis to a domain, with a margin."""
    values = [float(str(value)) for value in domain.extremes()]
    low, high = min(values), max(values)
    if isinstance(domain, LogUniform):
        axes.set_xlim(low / (high / low) ** _MARGIN, high * (high / low) ** _MARGIN)
    elif high > low:
        axes.set_xlim(low - _MARGIN * (high - low), high + _MARGIN * (high - low))


def _is_numeric(domain: Domain) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) for v in domain.extremes())


def _domain_share(domain: Domain, value: Any) -> float:
    return math.nan if value is None else domain.share_of(value)


def _ends(domain: Domain) -> Sequence[Any]:
    extremes = domain.extremes()
    return [extremes[0], extremes[-1]]


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot no display is needed, and figures are freed when they are dropped.
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


def headings(standings: Standings, space: Mapping[str, Domain]) -> list[str]:
    """Return the headings of the table of trials."""
    return ["", "trial", *map(_shorten_key, space), standings.metric, "step", "tokens", "state"]


def rows(standings: Standings, space: Mapping[str, Domain]) -> list[list[str]]:
    """Return the cells of every trial, in the order of `ordered`."""
    best = standings.best()
    return [_row(trial, standings.metric, space, trial is best) for trial in sort_trials(standings)]


def sort_trials(standings: Standings) -> list[Trial]:
    """Return the trials: running ones first, then by value, the best first; those without a value
    last."""
    sign = 1.0 if standings.mode == "min" else -1.0

    def place(trial: Trial) -> tuple[bool, float, str]:
        value = sign * trial.value(standings.metric)
        return (
            trial.is_over,
            value if trial.counts and not math.isnan(value) else math.inf,
            trial.id,
        )

    return sorted(standings.trials.values(), key=place)


def _row(trial: Trial, metric: str, space: Mapping[str, Domain], is_best: bool) -> list[str]:
    last = trial.last
    return [
        "*" if is_best else "",
        trial.id,
        *(_format_value(trial.values.get(key)) for key in space),
        f"{trial.value(metric):.4f}" if last and trial.counts else "",
        str(last.step) if last else "",
        f"{trial.tokens:,}" if last else "",
        trial.state,
    ]


def _shorten_key(key: str) -> str:
    """Return the distinctive end of a dotted key, such as `lr` or `betas.1`."""
    parts = key.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _format_value(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_STYLE = (
    f"body{{font:15px/1.5 system-ui,sans-serif;color:{INK};max-width:70rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;"
    f"font-size:14px}}td,th{{padding:.2rem .7rem;text-align:right;border-bottom:1px solid {GRID}}}"
    f"th{{color:{QUIET};font-weight:500}}tr.best{{font-weight:700;color:{RED}}}"
    "img{max-width:100%;margin:1rem 0}.wide{overflow-x:auto}"
)


def publish(
    folder: Storage,
    standings: Standings,
    config: SweepConfig,
    tracker: Tracker,
    warn: Callable[[str], None],
) -> None:
    """Write the plots and the report to the sweep's folder and to MLflow.

    Calls `warn` with a line for each plot that needs a package that is not installed.
    """
    pictures = {}
    for name in PICTURES:
        try:
            pictures[f"{name}.png"] = png(draw(name, standings, config.space))
        except UserError as error:
            warn(f"no picture of the {error}")
    page = _page(config, standings, pictures).encode()
    folder.write(page, REPORT_FILE)
    tracker.log_artifact(REPORT_FILE, page)
    for name, data in pictures.items():
        folder.write(data, PLOTS, name)
        tracker.log_artifact(name, data, PLOTS)


def html_table(standings: Standings, space: Mapping[str, Domain]) -> str:
    """Return the trials as an HTML table with the best one marked."""
    best = standings.best()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings(standings, space))
    lines = []
    for trial, cells in zip(sort_trials(standings), rows(standings, space), strict=True):
        # Notebooks show the table without `_STYLE`.
        kind = ' class="best" style="font-weight:700"' if trial is best else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{html.escape(c)}</td>' for c in cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _page(config: SweepConfig, standings: Standings, pictures: Mapping[str, bytes]) -> str:
    best = standings.best()
    title = html.escape(f"Sweep {config.name} of {config.recipe}")
    verdict = "No trial has a value."
    if best:
        values = ", ".join(f"{key} = {value}" for key, value in best.values.items())
        value = f"{best.value(config.metric):.5g}"
        verdict = f"Best: trial {best.id}, {config.metric} {value} with {values}."
    # Embedded images make the report a single file.
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in pictures.items()
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(verdict)}</p>{images}"
        f'<div class="wide">{html_table(standings, config.space)}</div></html>\n'
    )
