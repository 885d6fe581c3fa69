"""Imported before all that forks share: Ray's random numbers are not begun before they are forks.

Ray seeds its generator with its first number, and a fork has its parent's: two workers would then
name their objects alike. It draws one where a class becomes an actor's, in an import.
"""

import os

import ray.actor
from ray._raylet import ActorClassID


class _Drawn:
    """In the place of Ray's: ids from the system's random numbers."""

    @staticmethod
    def from_random() -> ActorClassID:
        return ActorClassID(os.urandom(ActorClassID.size()))


ray.actor.ActorClassID = _Drawn
