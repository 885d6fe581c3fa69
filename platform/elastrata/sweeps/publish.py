"""The report of a sweep: pictures and one HTML file with all of it, in its folder and on record."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from elastrata.sweeps.domains import Domain
from elastrata.sweeps.folder import PLOTS, REPORT_FILE
from elastrata.sweeps.plots import PICTURES, draw, png
from elastrata.sweeps.standings import Standings
from elastrata.sweeps.sweep import SweepConfig
from elastrata.sweeps.table import headings, ordered, rows
from elastrata.tracking.tracker import Tracker
from elastrata_pipelines.storage import Storage

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:70rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;"
    "font-size:14px}td,th{padding:.2rem .7rem;text-align:right;border-bottom:1px solid #e4e7eb}"
    "th{color:#7b8794;font-weight:500}tr.best{font-weight:700;color:#d1495b}"
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
    found = "No trial has a value."
    if best:
        values = ", ".join(f"{key} = {value}" for key, value in best.values.items())
        value = f"{best.value(config.metric):.5g}"
        found = f"Best: trial {best.id}, {config.metric} {value} with {values}."
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for name, data in zip(PICTURES, pictures, strict=True)
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(found)}</p>{images}"
        f'<div class="wide">{html_table(standings, config.space)}</div></html>\n'
    )
