"""The pictures of a sweep show every trial: where it is, or at the edge, with a word about it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from matplotlib.figure import Figure

from elastrata.sweeps.domains import Domain
from elastrata.sweeps.plots import PICTURES, draw, png
from elastrata.sweeps.standings import Standings
from elastrata.sweeps.sweep import SweepConfig

SPACE = {
    "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
    "optimizer.name": {"choice": ["lamb", "adamw"]},
}
LOSSES = [6.4, 6.5, 6.6, 6.7, 40.0, 55.0, math.nan]
EDGES = {"min": ("^", 1.0), "max": ("v", 0.0)}


def _space() -> dict[str, Domain]:
    values = {"recipe": "bert/tiny", "space": SPACE}
    return SweepConfig.model_validate(values).space


def _standings(values: list[float], mode: str = "min") -> Standings:
    entries: list[dict[str, Any]] = []
    sign = 1 if mode == "min" else -1
    for number, value in enumerate(values):
        trial = {"trial": f"{number:04d}"}
        name = ("adamw", "lamb")[number % 2]
        point = {"optimizer.lr": 1e-4 * 2**number, "optimizer.name": name}
        entries.append({"kind": "suggested", **trial, "values": point})
        for step in (1, 2):
            report = {"step": step, "samples": step, "tokens": 100 * step, "seconds": 1.0}
            metrics = {"eval/loss": sign * value / step**0.01}
            entries.append({"kind": "reported", **trial, **report, "metrics": metrics})
        state = "diverged" if math.isnan(value) else "finished"
        entries.append({"kind": "concluded", **trial, "state": state, "text": ""})
    return Standings("eval/loss", mode, entries)


def _note(figure: Figure) -> str:
    return figure._supxlabel.get_text() if figure._supxlabel else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("picture", ["curves", "keys", "parallel"])
def test_trials_beyond_the_axis_are_named(picture: str, mode: str) -> None:
    figure = draw(picture, _standings(LOSSES, mode), _space())
    assert png(figure).startswith(b"\x89PNG")
    told = "Trials beyond the axis, drawn at its edge: 0004, 0005; diverged or failed: 0006."
    assert _note(figure) == told


@pytest.mark.parametrize("mode", ["min", "max"])
def test_every_trial_has_a_mark_in_every_panel(mode: str) -> None:
    figure = draw("keys", _standings(LOSSES, mode), _space())
    arrow, edge = EDGES[mode]
    for axes in figure.axes:
        lines = axes.get_lines()
        assert len(lines) == len(LOSSES)
        at_edge = [line for line in lines if line.get_marker() in (arrow, "x")]
        assert [line.get_marker() for line in at_edge] == [arrow, arrow, "x"]
        assert all(list(line.get_ydata()) == [edge] for line in at_edge)
        low, high = axes.get_ylim()
        others = [line.get_ydata()[0] for line in lines if line not in at_edge]
        assert all(low < value < high for value in others)
    names = [label.get_text() for label in figure.axes[1].get_xticklabels()]
    assert names == ["lamb", "adamw"]


@pytest.mark.parametrize("picture", PICTURES)
def test_nothing_is_said_where_nothing_is_hidden(picture: str) -> None:
    assert _note(draw(picture, _standings([6.4, 6.5, 6.6]), _space())) == ""


def test_many_are_counted() -> None:
    losses = [6.4 + number / 100 for number in range(30)] + [50.0] * 12
    figure = draw("curves", _standings(losses), _space())
    assert _note(figure).endswith("0036, 0037 and 4 more.")
