"""The folder of a sweep: its configuration, its journal, its trials and what is made of them."""

from __future__ import annotations

import yaml

from elastrata.sweeps.sweep import SweepConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

SWEEP_FILE, JOURNAL, TRIALS, PLOTS, REPORT_FILE = (
    "sweep.yaml",
    "journal",
    "trials",
    "plots",
    "report.html",
)
MAY_CHANGE = {"name", "trials", "concurrency", "max_seconds", "max_failures", "keep"}
"""Keys of a sweep that it may be continued with another value of."""


def check_same_sweep(folder: Storage, config: SweepConfig) -> None:
    """Refuses to continue a sweep as another one.

    Raises:
        UserError: the folder holds a sweep with another space, recipe, searcher or scheduler.
    """
    if not folder.exists(SWEEP_FILE):
        return
    before = yaml.safe_load(folder.read(SWEEP_FILE))
    values = config.model_dump(mode="json")
    different = [key for key in values if key not in MAY_CHANGE and values[key] != before.get(key)]
    if different:
        raise UserError(
            *(f"{folder.uri(SWEEP_FILE)}: {key}: is another one there" for key in different),
            f"sweep '{config.name}' exists; choose another --name, or give it back its values",
        )


def write_sweep(folder: Storage, config: SweepConfig) -> None:
    """Writes what the sweep is."""
    values = config.model_dump(mode="json")
    folder.write(yaml.safe_dump(values, sort_keys=False).encode(), SWEEP_FILE)


def read_sweep(folder: Storage) -> SweepConfig:
    """The sweep in a folder.

    Raises:
        UserError: there is none.
    """
    try:
        return SweepConfig.model_validate(yaml.safe_load(folder.read(SWEEP_FILE)))
    except FileNotFoundError:
        raise UserError(f"{folder.uri()}: no sweep there") from None
