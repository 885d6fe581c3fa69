"""The best trial of a sweep, to go on with: its values as a recipe of full length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.folder import SWEEP_FILE
from elastrata.sweeps.result import SweepResult, read_result
from elastrata.sweeps.trial_recipe import base_recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

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
