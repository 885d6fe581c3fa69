"""The report of a sweep: pictures and one HTML file with all of it, in its folder and on record."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastrata.sweeps.domains import Domain
from elastrata.sweeps.folder import PLOTS, REPORT_FILE
from elastrata.sweeps.plots import PICTURES, draw, png
from elastrata.sweeps.standings import Standings, Trial
from elastrata.sweeps.sweep import SweepConfig
from elastrata.tracking.plots import GRID, INK, QUIET, RED
from elastrata.tracking.tracker import Tracker
from elastrata_pipelines.storage import Storage


def headings(standings: Standings, space: Mapping[str, Domain]) -> list[str]:
    """The names of the columns."""
    return ["", "trial", *map(_short, space), standings.metric, "step", "tokens", "state"]


def rows(standings: Standings, space: Mapping[str, Domain]) -> list[list[str]]:
    """The cells of every trial, in the order of `ordered`."""
    best = standings.best()
    return [_row(trial, standings.metric, space, trial is best) for trial in ordered(standings)]


def ordered(standings: Standings) -> list[Trial]:
    """All trials, those that run first, then the best ones; those without a value last."""
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
        *(_shown(trial.values.get(key)) for key in space),
        f"{trial.value(metric):.4f}" if last and trial.counts else "",
        str(last.step) if last else "",
        f"{trial.tokens:,}" if last else "",
        trial.state,
    ]


def _short(key: str) -> str:
    """The end of a dotted key that tells what it is: `betas.1`, `lr`."""
    parts = key.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _shown(value: Any) -> str:
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


def publish(folder: Storage, standings: Standings, config: SweepConfig, tracker: Tracker) -> None:
    """Draws the pictures and writes the report, to the sweep's folder and its record."""
    pictures = {f"{name}.png": png(draw(name, standings, config.space)) for name in PICTURES}
    page = _page(config, standings, list(pictures.values())).encode()
    folder.write(page, REPORT_FILE)
    tracker.log_artifact(REPORT_FILE, page)
    for name, data in pictures.items():
        folder.write(data, PLOTS, name)
        tracker.log_artifact(name, data, PLOTS)


def html_table(standings: Standings, space: Mapping[str, Domain]) -> str:
    """The trials as an HTML table, the best one marked."""
    best = standings.best()
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headings(standings, space))
    lines = []
    for trial, cells in zip(ordered(standings), rows(standings, space), strict=True):
        kind = ' class="best" style="font-weight:700"' if trial is best else ""
        lines.append(f"<tr{kind}>{''.join(f'<td>{html.escape(c)}</td>' for c in cells)}</tr>")
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _page(config: SweepConfig, standings: Standings, pictures: Sequence[bytes]) -> str:
    best = standings.best()
    title = html.escape(f"Sweep {config.name} of {config.recipe}")
    verdict = "No trial has a value."
    if best:
        values = ", ".join(f"{key} = {value}" for key, value in best.values.items())
        value = f"{best.value(config.metric):.5g}"
        verdict = f"Best: trial {best.id}, {config.metric} {value} with {values}."
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in zip(PICTURES, pictures, strict=True)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(verdict)}</p>{images}"
        f'<div class="wide">{html_table(standings, config.space)}</div></html>\n'
    )
