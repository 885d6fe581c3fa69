"""The table of a sweep: a row of text for every trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from elastrata.sweeps.domains import Domain
from elastrata.sweeps.report import Trial
from elastrata.sweeps.standings import Standings


def headings(standings: Standings, space: Mapping[str, Domain]) -> list[str]:
    """What the columns are called."""
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
