"""The folder of a sweep, and the result that is read from it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import dump_yaml
from elastrata.run import history
from elastrata.run.claim import SWEEP_FILE, TRIALS
from elastrata.run.folder import flatten, read_values
from elastrata.run.history import History
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import LAUNCHED, Standings, Trial
from elastrata.sweeps.trial_recipe import base_recipe
from elastrata_pipelines.checked_json import list_names, read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


BASE_FILE, JOURNAL, PLOTS, REPORT_FILE = "recipe.yaml", "journal", "plots", "report.html"
_WHERE_AND_HOW = ("name", "storage", "workers", "checkpoint", "tracking")
MAY_CHANGE = {"name", "recipe", "trials", "concurrency", "max_seconds", "max_failures", "keep"}
"""Keys of a sweep that it may be continued with another value of; of the recipe, what it says
counts, not its name."""

_PREPARATION = re.compile(r"(phases\.\d+\.)?data\.prepare(\.|$)")
"""What earlier versions have written down, too."""


def check_same_sweep(folder: Storage, config: SweepConfig, base: Recipe) -> None:
    """Refuses to continue a sweep as another one.

    Raises:
        UserError: the folder holds a sweep with another space, searcher or scheduler, or of another
            recipe; a line for each key.
    """
    if not folder.exists(SWEEP_FILE):
        return
    problems = []
    for name, now in ((SWEEP_FILE, _sweep_values(config)), (BASE_FILE, _base_values(base))):
        before, now = flatten(read_values(folder, name)), flatten(now)
        problems += [
            f"{folder.uri(name)}: {key}: {before.get(key)!r} in the sweep of this name, "
            f"{now.get(key)!r} in this one"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
            and key.split(".")[0] not in MAY_CHANGE
            and not _PREPARATION.match(key)
        ]
    if problems:
        advice = "choose another --name, or give it back its values"
        raise UserError(*problems, f"sweep '{config.name}' exists; {advice}")


def write_sweep(folder: Storage, config: SweepConfig, base: Recipe) -> None:
    """Writes what the sweep is."""
    for name, values in ((BASE_FILE, _base_values(base)), (SWEEP_FILE, _sweep_values(config))):
        folder.write(dump_yaml(values).encode(), name)


def _sweep_values(config: SweepConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _base_values(base: Recipe) -> dict[str, Any]:
    """The values that decide what a trial learns."""
    return base.as_recorded().model_dump(mode="json", exclude=set(_WHERE_AND_HOW))


def read_sweep(folder: Storage) -> SweepConfig:
    """The sweep in a folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    if not folder.exists(SWEEP_FILE):
        raise UserError(f"{folder.uri()}: no sweep there")
    try:
        return SweepConfig.model_validate(values := read_values(folder, SWEEP_FILE))
    except ValidationError as error:
        text = RecipeText(file=folder.uri(SWEEP_FILE), name="", values=values)
        raise UserError(*recipe_problems(error, SweepConfig, text)) from None


def sweep_digest(folder: Storage) -> str:
    """SHA-256 of the file that says what the sweep is; a launch notes it in the journal."""
    return hashlib.sha256(read_bytes(folder, SWEEP_FILE)).hexdigest()


def read_journal(folder: Storage) -> History:
    """The journal of a sweep.

    Raises:
        UserError: it cannot be read, is not a journal, or holds parts that do not belong to it.
    """
    journal = folder.sub(JOURNAL)
    found = history.look(journal)
    if not found.entries and list_names(folder, TRIALS):
        raise UserError(f"{journal.uri()}: empty or missing, though the sweep has trials")
    if found.foreign:
        raise UserError(*(f"{line}; move it away" for line in found.foreign))
    if found.entries and all(entry["kind"] != LAUNCHED for entry in found.entries):
        raise UserError(f"{journal.uri()}: no launch is noted: it is the history of something else")
    return found


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
        from elastrata.sweeps.plots import html_table

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
        problems=(
            *journal.problems,
            *unknown_trials(storage, standings),
            *_problems(storage, launches),
        ),
    )


def unknown_trials(folder: Storage, standings: Standings) -> list[str]:
    """A line for each folder of a trial that the journal does not name: its lines are lost."""
    names = [name for name in list_names(folder, TRIALS) if name not in standings.trials]
    return [
        f"{folder.uri(TRIALS, name)}: not in the journal, whose lines are lost" for name in names
    ]


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
