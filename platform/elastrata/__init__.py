"""Elastic pre-training of transformer language models on Ray.

`import elastrata` loads nothing: a name is imported when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastrata.api import fork, generate, inspect, prepare, status, sweep, train
    from elastrata.driver.result import TrainResult
    from elastrata.recipe.file import load_recipe
    from elastrata.recipe.recipe import Recipe
    from elastrata.sweeps.config import SweepConfig, load_sweep
    from elastrata.sweeps.result import SweepResult
    from elastrata.workload.workload import Workload
    from elastrata_pipelines.errors import UserError
    from elastrata_pipelines.preparation import PrepareConfig

__all__ = [
    "PrepareConfig",
    "Recipe",
    "SweepConfig",
    "SweepResult",
    "TrainResult",
    "UserError",
    "Workload",
    "fork",
    "generate",
    "inspect",
    "load_recipe",
    "load_sweep",
    "prepare",
    "status",
    "sweep",
    "train",
]

_HOMES = {
    "PrepareConfig": "elastrata_pipelines.preparation",
    "Recipe": "elastrata.recipe.recipe",
    "SweepConfig": "elastrata.sweeps.config",
    "SweepResult": "elastrata.sweeps.result",
    "TrainResult": "elastrata.driver.result",
    "UserError": "elastrata_pipelines.errors",
    "Workload": "elastrata.workload.workload",
    "fork": "elastrata.api",
    "generate": "elastrata.api",
    "inspect": "elastrata.api",
    "load_recipe": "elastrata.recipe.file",
    "load_sweep": "elastrata.sweeps.config",
    "prepare": "elastrata.api",
    "status": "elastrata.api",
    "sweep": "elastrata.api",
    "train": "elastrata.api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'elastrata' has no attribute '{name}'")
    # Before the import of Ray, which would already send the request.
    if "ipykernel" in sys.modules:
        _keep_notebooks_quiet()
    return getattr(import_module(_HOMES[name]), name)


def _keep_notebooks_quiet() -> None:
    """Suppress requests of Ray and tqdm for ipywidgets, which this package does not need."""
    import logging
    import warnings

    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="IProgress not found")


def __dir__() -> list[str]:
    return sorted(__all__)
