"""The folder of a sweep: its configuration, its journal, its trials and what is made of them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from pydantic import ValidationError

from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import dump_yaml
from elastrata.run import history
from elastrata.run.claim import SWEEP_FILE, TRIALS
from elastrata.run.folder import flatten, read_values
from elastrata.run.history import History
from elastrata.sweeps.standings import LAUNCHED
from elastrata.sweeps.sweep import SweepConfig
from elastrata_pipelines.checked_json import list_names, read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

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
