"""The result of a sweep: what `elastrata.sweep` returns, and what can be read back later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from elastrata.recipe.recipe import Recipe
from elastrata.run.claim import SWEEP_FILE
from elastrata.sweeps.folder import read_journal, read_sweep, sweep_digest
from elastrata.sweeps.standings import LAUNCHED, Standings, Trial
from elastrata.sweeps.sweep import SweepConfig
from elastrata.sweeps.trial_recipe import base_recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


Picture = Literal["curves", "keys", "parallel", "importance"]


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A sweep that has ended, or stands where it was interrupted."""

    name: str
    folder: str
    """The sweep's folder or URL."""
    mlflow_run_id: str | None
    """Its run in MLflow, which has one below it for every trial; None where it is not known."""
    status: str
    """`FINISHED`: all trials are over; `KILLED`: interrupted, or out of time."""
    config: SweepConfig
    standings: Standings = field(repr=False)
    """All trials with all their reports."""
    seconds: float
    """The time from the start of the launch to its end; 0 where it was read back."""
    problems: tuple[str, ...] = ()
    """A line for each thing in the sweep's folder that is not as it was written."""

    @property
    def best(self) -> Trial | None:
        """The trial with the best newest value; None where none has one."""
        return self.standings.best()

    @property
    def best_value(self) -> float | None:
        """The metric of the best trial."""
        return self.best.value(self.config.metric) if self.best else None

    @property
    def best_values(self) -> Mapping[str, Any]:
        """The values of the best trial, by dotted key: changes for `load_recipe`."""
        return dict(self.best.values) if self.best else {}

    @property
    def trials(self) -> pd.DataFrame:
        """A row for every trial: `trial`, `state`, the metrics of its newest report, `step`,
        `tokens`, `seconds`, `text`, and a column for every key of the space."""
        import pandas as pd

        return pd.DataFrame([self._row(trial) for trial in self.standings.trials.values()])

    def plot(self, picture: Picture = "curves") -> Figure:
        """A picture: `curves` of all trials, the metric against each of the `keys`, `parallel`
        coordinates, or the `importance` of each key."""
        from elastrata.sweeps.plots import draw

        return draw(picture, self.standings, self.config.space)

    def summary(self) -> dict[str, Any]:
        """Plain JSON values: what `elastrata sweep --json` prints."""
        states = [trial.state for trial in self.standings.trials.values()]
        return {
            "sweep": self.folder,
            "mlflow_run_id": self.mlflow_run_id,
            "status": self.status,
            "metric": self.config.metric,
            "trials": {state: states.count(state) for state in dict.fromkeys(states)},
            "best": self._row(self.best) if self.best else None,
            "tokens": sum(trial.tokens for trial in self.standings.trials.values()),
            "seconds": self.seconds,
            "seconds_training": sum(t.seconds for t in self.standings.trials.values()),
            "problems": list(self.problems),
        }

    def _repr_html_(self) -> str:
        from elastrata.sweeps.publish import html_table

        return html_table(self.standings, self.config.space)

    def _row(self, trial: Trial) -> dict[str, Any]:
        last = trial.last
        return {
            "trial": trial.id,
            "state": trial.state,
            **(last.metrics if last else {}),
            "step": last.step if last else 0,
            "tokens": trial.tokens,
            "seconds": trial.seconds,
            **{key: trial.values.get(key) for key in self.config.space},
            "text": trial.text,
        }


def read_result(folder: str) -> SweepResult:
    """Reads a sweep back from its folder.

    Raises:
        UserError: there is none, or something of it was altered so that it cannot be read.
    """
    storage = Storage(folder)
    config, journal = read_sweep(storage), read_journal(storage)
    entries = journal.entries
    standings = Standings(config.metric, config.mode, entries)
    over = [trial.is_over for trial in standings.trials.values()]
    launches = [entry for entry in entries if entry["kind"] == LAUNCHED]
    return SweepResult(
        name=config.name or "",
        folder=storage.uri(),
        mlflow_run_id=launches[-1]["mlflow_run_id"] if launches else None,
        status="FINISHED" if all(over) and len(over) >= 1 else "KILLED",
        config=config,
        standings=standings,
        seconds=0.0,
        problems=(*journal.problems, *_problems(storage, launches)),
    )


def _problems(folder: Storage, launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line where the sweep is not the one that was launched last."""
    launched = launches[-1].get("sweep_sha256") if launches else None
    if launched in (None, sweep_digest(folder)):
        return []
    return [f"{folder.uri(SWEEP_FILE)}: altered since the sweep was last continued"]


_LENGTH = re.compile(r"(phases\.\d+\.)?(steps|epochs|tokens)")
"""Keys by which a sweep's trials are shorter than the recipe."""


def find_sweep(place: str) -> SweepResult:
    """Reads a sweep back.

    Args:
        place: its folder or URL, or the name of one in `runs`.

    Raises:
        UserError: there is none.
    """
    named = Storage("runs").sub(place)
    is_name = not Storage(place).exists(SWEEP_FILE) and named.exists(SWEEP_FILE)
    return read_result(named.uri() if is_name else place)


def best_recipe(result: SweepResult, changes: Mapping[str, Any]) -> Recipe:
    """The sweep's recipe with the values of its best trial, and with the steps that the recipe has,
    not those of the trials; a run of its own beside the sweep.

    Args:
        result: of the sweep.
        changes: by dotted key: what is to differ from that.

    Raises:
        UserError: no trial has a value, or recipe and values do not go together any more.
    """
    best = result.best
    if best is None:
        raise UserError(f"{result.folder}: no trial has a value of {result.config.metric} yet")
    root, _, name = result.folder.rpartition("/")
    common = {k: v for k, v in result.config.changes.items() if not _LENGTH.fullmatch(k)}
    own = {"name": f"{name}-best", "storage": root, **changes}
    base = base_recipe(result.config.recipe, {**common, **own})
    return base.trial({key: value for key, value in best.values.items() if key not in changes})
