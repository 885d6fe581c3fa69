"""The pictures of a sweep show every trial: where it is, or at the edge, with a word about it."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
from matplotlib.figure import Figure

from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import Standings
from elastrata.sweeps.plots import draw, importances, png
from elastrata.sweeps.space import Domain
from elastrata_pipelines.errors import UserError

SPACE = {
    "optimizer.lr": {"loguniform": [1e-4, 1e-1]},
    "optimizer.name": {"choice": ["lamb", "adamw"]},
}
LOSSES = [6.4, 6.5, 6.6, 6.7, 40.0, 55.0, math.nan]


def _space() -> dict[str, Domain]:
    values = {"recipe": "bert/tiny", "space": SPACE}
    return SweepConfig.model_validate(values).space


def _trial(id: str, values: dict[str, Any], losses: list[float]) -> list[dict[str, Any]]:
    """The entries of a trial; without a number as its last loss it has diverged."""
    state = "diverged" if math.isnan(losses[-1]) else "finished"
    reports = [
        {
            **{"kind": "reported", "trial": id, "step": step, "samples": step},
            **{"tokens": 100 * step, "seconds": 1.0, "metrics": {"eval/loss": loss}},
        }
        for step, loss in enumerate(losses, start=1)
    ]
    return [
        {"kind": "suggested", "trial": id, "values": values},
        *reports,
        {"kind": "concluded", "trial": id, "state": state, "text": ""},
    ]


def _standings(values: list[float], mode: str = "min") -> Standings:
    entries: list[dict[str, Any]] = []
    sign = 1 if mode == "min" else -1
    for number, value in enumerate(values):
        point = {
            "optimizer.lr": min(0.1, 1e-4 * 2**number),
            "optimizer.name": ("adamw", "lamb")[number % 2],
        }
        losses = [sign * value / step**0.01 for step in (1, 2)]
        entries += _trial(f"{number:04d}", point, losses)
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


def test_importance_finds_the_key_that_matters() -> None:
    rng = Random(0)
    entries: list[dict[str, Any]] = []
    for number in range(40):
        lr, name = rng.uniform(1e-4, 1e-1), rng.choice(["adamw", "lamb"])
        loss = math.nan if number == 7 else (lr - 0.05) ** 2
        entries += _trial(f"{number:04d}", {"optimizer.lr": lr, "optimizer.name": name}, [loss])
    shares = importances(Standings("eval/loss", "min", entries), _space())
    assert next(iter(shares)) == "optimizer.lr"
    assert shares["optimizer.lr"] > 0.7
    assert importances(Standings("eval/loss", "min", entries[:3]), _space()) == {}


def test_without_optuna_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastrata.sweeps.plots.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install optuna"):
        draw("importance", _standings(LOSSES), _space())
