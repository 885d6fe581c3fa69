"""The orphans of a run: placement groups whose controller died, or gave up and left them behind."""

from __future__ import annotations

from typing import Any

import ray
from ray import PlacementGroupID
from ray._private.state import state
from ray.core.generated import gcs_pb2
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, remove_placement_group

_KEY = "elastrata-controller:"


def note_controller(run: str) -> None:
    """Called in Ray Train's controller: says which actor makes the placement groups of that run."""
    actor = ray.get_runtime_context().get_actor_id() or ""
    internal_kv._internal_kv_put(f"{_KEY}{run}", actor.encode())


def remove_leaked(run: str) -> None:
    """Frees what the run's newest controller has placed: Ray keeps that until the job ends. What
    other runs of this job have placed stays."""
    actor: Any = internal_kv._internal_kv_get(f"{_KEY}{run}")
    if not actor:
        return
    accessor: Any = state._connect_and_get_accessor()
    for data in accessor.get_placement_group_table():
        group: Any = gcs_pb2.PlacementGroupTableData.FromString(data)  # type: ignore[attr-defined]
        if group.creator_actor_id.hex() == actor.decode() and group.state != group.REMOVED:
            remove_placement_group(PlacementGroup(PlacementGroupID(group.placement_group_id)))
