"""The run that tests of live runs disturb, and the same run undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.live_run import LiveRun
from support.short_steps import write_recipe

STEPS = 600


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("faults"), steps=STEPS)


@pytest.fixture(scope="session")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    log = tmp_path_factory.mktemp("undisturbed") / "log"
    alone = LiveRun(recipe, "undisturbed", log, "workers.max=1", "checkpoint.hot_steps=0")
    alone.end()
    return alone.steps()
