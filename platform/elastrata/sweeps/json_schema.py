"""The JSON Schema of sweep files, for editors."""

from __future__ import annotations

from typing import Any

from elastrata.recipe.json_schema import DRAFT
from elastrata.sweeps.sweep import SweepConfig


def sweep_schema() -> dict[str, Any]:
    """The schema of a sweep file. Which keys a recipe has is not in it: the command checks them."""
    return {"$schema": DRAFT, **SweepConfig.model_json_schema(), "title": "Elastrata sweep"}
