"""Leaked placement groups of a run, left behind by a controller that died or gave up."""

from __future__ import annotations

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastrata.cluster.ray_internals import placement_groups_of, read_value, store_value

_KEY = "elastrata-controller:"


def note_controller(run: str) -> None:
    """In Ray Train's controller: record which actor creates the placement groups of the run."""
    actor = ray.get_runtime_context().get_actor_id() or ""
    store_value(f"{_KEY}{run}", actor)


def remove_leaked(run: str) -> None:
    """Remove the placement groups of the run's newest controller; those of other runs in this job
    stay."""
    # Ray would keep their resources reserved until the job ends.
    if actor := read_value(f"{_KEY}{run}"):
        for group in placement_groups_of(actor):
            remove_placement_group(PlacementGroup(PlacementGroupID(group)))
