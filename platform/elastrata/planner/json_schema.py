"""The JSON Schema of cluster files, for editors."""

from __future__ import annotations

from typing import Any

from elastrata.planner.cluster_config import ClusterConfig
from elastrata.recipe.json_schema import DRAFT


def cluster_schema() -> dict[str, Any]:
    """The schema of a cluster file as `elastrata plan` reads it."""
    return {"$schema": DRAFT, **ClusterConfig.model_json_schema(), "title": "Elastrata cluster"}
