"""The shipment: what a job takes along to a cluster, and what it cannot."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.storage import Storage

RECIPE = "recipe.yaml"
"""The recipe in the job's working directory, whole: with all that it extends."""
_PACKAGES = ("elastrata", "elastrata_pipelines", "elastrata_workloads")
_STOP_SECONDS = 60
"""After the checkpoint of a stopped run, for its record and its workers' end."""


def runtime_env(recipe: Recipe, folder: Path, *, with_packages: bool) -> dict[str, Any]:
    """The runtime environment of a job that trains.

    Args:
        recipe: what it trains.
        folder: has the recipe's file, and becomes the job's working directory.
        with_packages: whether to ship Elastrata, too.
    """
    seconds = math.ceil(recipe.checkpoint.grace_seconds) + _STOP_SECONDS
    return {
        "working_dir": str(folder),
        # Between the SIGTERM of `ray job stop` and its SIGKILL; Ray's own default is 3.
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(seconds)},
        **({"py_modules": list(packages()), "excludes": ["__pycache__"]} if with_packages else {}),
    }


def packages() -> Iterator[str]:
    """The folders of Elastrata's packages, and of what says that they are installed: without it
    nobody would find the workloads."""
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.origin:
            yield str(Path(spec.origin).parent)
    try:
        metadata = distribution("elastrata").locate_file("")
    except PackageNotFoundError:
        return
    yield from (str(path) for path in Path(str(metadata)).glob("elastrata-*.dist-info"))


def local_paths(recipe: Recipe) -> Iterator[str]:
    """A line for each folder that would be sought in the job's own, which is gone with it."""
    named = {
        "storage": recipe.storage,
        "evaluation.path": recipe.evaluation.path,
        **{
            f"phases.{number}.data.path" if recipe.phases else "data.path": part.data.path
            for number, part in enumerate(recipe.parts)
        },
    }
    for key, path in named.items():
        if path is not None and not Path(path).is_absolute() and Storage(path).is_local:
            yield (
                f"{key}: {path}: expected a URL, or the absolute path of a folder that all nodes "
                "share: a job's own folder is gone with it"
            )
