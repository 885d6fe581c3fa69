"""Leaked placement groups of a run: their controller died, or gave up and left them behind."""

from __future__ import annotations

import ray
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from elastrata.cluster.ray_internals import keep, kept, placement_groups_of

_KEY = "elastrata-controller:"


def note_controller(run: str) -> None:
    """Called in Ray Train's controller: says which actor makes the placement groups of that run."""
    actor = ray.get_runtime_context().get_actor_id() or ""
    keep(f"{_KEY}{run}", actor)


def remove_leaked(run: str) -> None:
    """Frees what the run's newest controller has placed: Ray keeps that until the job ends. What
    other runs of this job have placed stays."""
    if actor := kept(f"{_KEY}{run}"):
        for group in placement_groups_of(actor):
            remove_placement_group(PlacementGroup(PlacementGroupID(group)))
