"""Where the workers of a group are: a placement group for each, so that they come and go singly."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from typing_extensions import override

from elastrata.cluster.ray_train_internals import PlacementGroupHandle

_numbers = count()


class WorkerPlaces(PlacementGroupHandle):
    """Placement groups of one bundle each, by numbers that no other one of this process has.

    Ray places each where it leaves the least free, so that workers are together on few nodes.
    """

    def __init__(self) -> None:
        self._groups: dict[int, PlacementGroup] = {}

    def reserve(
        self, bundle: Mapping[str, float], selectors: Sequence[Mapping[str, str] | None]
    ) -> list[int]:
        """Asks for one more place for each label selector, and returns their numbers."""
        added = {
            next(_numbers): placement_group(
                [dict(bundle)], bundle_label_selector=[dict(selector)] if selector else None
            )
            for selector in selectors
        }
        self._groups |= added
        return list(added)

    def free(self, number: int) -> None:
        """Gives a place back; what runs there is ended."""
        remove_placement_group(self._groups.pop(number))

    def __getitem__(self, number: int) -> PlacementGroup:
        return self._groups[number]

    @property
    def numbers(self) -> list[int]:
        """Of all places, in the order in which they were asked for."""
        return list(self._groups)

    @property
    @override
    def placement_group(self) -> Any:
        """What Ray Train hands on to whoever starts the workers."""
        return self

    @override
    def ready(self) -> Any:
        return [group.ready() for group in self._groups.values()]

    @override
    def wait(self, timeout_seconds: float = 30) -> bool:
        """Whether all are to be had within so many seconds."""
        deadline = time.monotonic() + timeout_seconds
        return all(
            group.wait(max(0.0, deadline - time.monotonic())) for group in self._groups.values()
        )

    @override
    def shutdown(self) -> None:
        for number in list(self._groups):
            self.free(number)
