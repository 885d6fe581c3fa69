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
_UNCOMPARED_SECTIONS = ("name", "storage", "workers", "checkpoint", "tracking")
# Keys that may differ when a sweep is continued. The recipe is compared by its contents, hence its
# name may differ.
CHANGEABLE_KEYS = {"name", "recipe", "trials", "concurrency", "max_seconds", "max_failures", "keep"}

# Earlier versions recorded these keys, too; they do not affect training.
_PREPARATION = re.compile(r"(phases\.\d+\.)?data\.prepare(\.|$)")


def check_same_sweep(folder: Storage, config: SweepConfig, base: Recipe) -> None:
    """Check that a sweep in the folder, if there is one, is the sweep that is to be continued.

    Raises:
        UserError: the folder holds a sweep with another space, searcher, scheduler or recipe; one
            line per key.
    """
    if SWEEP_FILE not in list_names(folder):
        return
    problems = []
    for name, now in ((SWEEP_FILE, _sweep_values(config)), (BASE_FILE, _base_values(base))):
        before, now = flatten(read_values(folder, name)), flatten(now)
        problems += [
            f"{folder.uri(name)}: {key}: {before.get(key)!r} in the sweep of this name, "
            f"{now.get(key)!r} in this one"
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
            and key.split(".")[0] not in CHANGEABLE_KEYS
            and not _PREPARATION.match(key)
        ]
    if problems:
        advice = "choose another --name, or restore its values"
        raise UserError(*problems, f"sweep '{config.name}' exists; {advice}")


def write_sweep(folder: Storage, config: SweepConfig, base: Recipe) -> None:
    """Write the sweep's configuration and its base recipe to its folder."""
    for name, values in ((BASE_FILE, _base_values(base)), (SWEEP_FILE, _sweep_values(config))):
        folder.write(dump_yaml(values).encode(), name)


def _sweep_values(config: SweepConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _base_values(base: Recipe) -> dict[str, Any]:
    """Return the values of the base recipe that affect the training of a trial."""
    return base.without_preparation().model_dump(mode="json", exclude=set(_UNCOMPARED_SECTIONS))


def read_sweep(folder: Storage) -> SweepConfig:
    """Read the configuration of the sweep in a folder.

    Raises:
        UserError: the folder holds no sweep, or its file is damaged.
    """
    if SWEEP_FILE not in list_names(folder):
        raise UserError(f"{folder.uri()}: no sweep here")
    try:
        return SweepConfig.model_validate(values := read_values(folder, SWEEP_FILE))
    except ValidationError as error:
        text = RecipeText(file=folder.uri(SWEEP_FILE), name="", values=values)
        raise UserError(*recipe_problems(error, SweepConfig, text)) from None


def sweep_digest(folder: Storage) -> str:
    """Return the SHA-256 of the sweep's configuration file; every launch records it in the
    journal."""
    return hashlib.sha256(read_bytes(folder, SWEEP_FILE)).hexdigest()


def read_journal(folder: Storage) -> History:
    """Read the journal of a sweep.

    Raises:
        UserError: the journal is unreadable, is the history of something else, or holds foreign
            parts.
    """
    journal = folder.sub(JOURNAL)
    journal_history = history.read_history(journal)
    # A lost journal must not start the sweep anew over existing trials.
    if not journal_history.entries and list_names(folder, TRIALS):
        raise UserError(f"{journal.uri()}: empty or missing, though the sweep has trials")
    if journal_history.foreign:
        raise UserError(*(f"{line}; move it away" for line in journal_history.foreign))
    if journal_history.entries and all(
        entry["kind"] != LAUNCHED for entry in journal_history.entries
    ):
        raise UserError(f"{journal.uri()}: no launch is recorded: not the journal of a sweep")
    return journal_history


Picture = Literal["curves", "keys", "parallel", "importance"]


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """Result of a sweep that has ended, or its state when it was interrupted."""

    name: str
    folder: str
    """The sweep's folder or URL."""
    mlflow_run_id: str | None
    """Its MLflow run, which has a child run for every trial; None if unknown."""
    status: str
    """`FINISHED`: all trials are over; `KILLED`: interrupted, or out of time."""
    config: SweepConfig
    standings: Standings = field(repr=False)
    """All trials with all their reports."""
    seconds: float
    """Duration of the launch; 0 if the result was read back from the folder."""
    problems: tuple[str, ...] = ()
    """A line for each part of the sweep's folder that was altered or damaged."""

    @property
    def best(self) -> Trial | None:
        """The trial with the best newest value; None if no trial has one."""
        return self.standings.best()

    @property
    def best_value(self) -> float | None:
        """The metric of the best trial; None without one."""
        return self.best.value(self.config.metric) if self.best else None

    @property
    def best_values(self) -> Mapping[str, Any]:
        """The values of the best trial, by dotted key: changes for `load_recipe`."""
        return dict(self.best.values) if self.best else {}

    @property
    def trials(self) -> pd.DataFrame:
        """A row per trial: `trial`, `state`, the metrics of its newest report, `step`, `tokens`,
        `seconds`, `text`, and a column for every key of the space."""
        import pandas as pd

        return pd.DataFrame([self._row(trial) for trial in self.standings.trials.values()])

    def plot(self, picture: Picture = "curves") -> Figure:
        """Draw a picture: `curves` of all trials, the metric against each of the `keys`, `parallel`
        coordinates, or the `importance` of each key."""
        from elastrata.sweeps.plots import draw

        return draw(picture, self.standings, self.config.space)

    def summary(self) -> dict[str, Any]:
        """Return the result as plain JSON values, which `elastrata sweep --json` prints."""
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
    """Read the result of a sweep from its folder.

    Raises:
        UserError: the folder holds no sweep, or a file of it is damaged.
    """
    storage = Storage(folder)
    config, journal = read_sweep(storage), read_journal(storage)
    entries = journal.entries
    standings = Standings(config.metric, config.mode, entries)
    are_over = [trial.is_over for trial in standings.trials.values()]
    launches = [entry for entry in entries if entry["kind"] == LAUNCHED]
    return SweepResult(
        name=config.name or "",
        folder=storage.uri(),
        mlflow_run_id=launches[-1]["mlflow_run_id"] if launches else None,
        status="FINISHED" if all(are_over) and len(are_over) >= 1 else "KILLED",
        config=config,
        standings=standings,
        seconds=0.0,
        problems=(
            *journal.problems,
            *unknown_trials(storage, standings),
            *_file_problems(storage, launches),
        ),
    )


def unknown_trials(folder: Storage, standings: Standings) -> list[str]:
    """Return a line per trial folder that the journal does not name, because its lines are lost."""
    names = [name for name in list_names(folder, TRIALS) if name not in standings.trials]
    return [
        f"{folder.uri(TRIALS, name)}: not in the journal, which has lost lines" for name in names
    ]


def _file_problems(folder: Storage, launches: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line if the sweep's file was altered since the last launch."""
    launched = launches[-1].get("sweep_sha256") if launches else None
    if launched in (None, sweep_digest(folder)):
        return []
    # Reports may then belong to another metric or space.
    return [f"{folder.uri(SWEEP_FILE)}: altered since the sweep was last continued"]


_LENGTH = re.compile(r"(phases\.\d+\.)?(steps|epochs|tokens)")
"""Keys by which a sweep makes its trials shorter than the recipe."""


def find_sweep(place: str) -> SweepResult:
    """Read the result of a sweep.

    Args:
        place: the sweep's folder or URL, or its name in the folder `runs`.

    Raises:
        UserError: there is no sweep.
    """
    named_folder = Storage("runs").sub(place)
    # A folder of that name takes precedence over a sweep in `runs`.
    is_name = (
        "://" not in place
        and not Storage(place).exists(SWEEP_FILE)
        and named_folder.exists(SWEEP_FILE)
    )
    return read_result(named_folder.uri() if is_name else place)


def best_recipe(result: SweepResult, changes: Mapping[str, Any]) -> Recipe:
    """Return the sweep's recipe with the values of its best trial, as a separate run next to the
    sweep.

    The run trains for as many steps as the recipe says, not for the shorter length of a trial.

    Args:
        result: the sweep's result.
        changes: further changes, by dotted key.

    Raises:
        UserError: no trial has a value, or the recipe no longer accepts the values.
    """
    best = result.best
    if best is None:
        raise UserError(f"{result.folder}: no trial has a value of {result.config.metric} yet")
    root, _, name = result.folder.rpartition("/")
    # `changes` usually shortens the trials; the best run has the recipe's full length.
    sweep_changes = {k: v for k, v in result.config.changes.items() if not _LENGTH.fullmatch(k)}
    run_keys = {"name": f"{name}-best", "storage": root, **changes}
    base = base_recipe(result.config.recipe, {**sweep_changes, **run_keys})
    return base.trial({key: value for key, value in best.values.items() if key not in changes})
