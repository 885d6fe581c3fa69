"""The observer: the driver's record of a run, from the events that the workers send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastrata.events import Committed, Evaluated, Event, Refused, Removed, Stalled, Started
from elastrata.record import StepRecord
from elastrata.tracking import Tracker


class Observer:
    """Passes events on to MLflow and to whoever shows progress, and remembers how the run stands.

    Args:
        tracker: of the run.
        show: called with every event.
    """

    def __init__(self, tracker: Tracker, show: Callable[[Event], None]) -> None:
        self._tracker = tracker
        self._show = show
        self._world_sizes: list[int] = []
        self.refused: tuple[str, ...] = ()

    def __call__(self, events: Sequence[Event]) -> None:
        """Handles events in the order they happened."""
        steps = [
            {"step": event.step, **event.to_metrics()}
            for event in events
            if isinstance(event, StepRecord | Evaluated | Stalled)
        ]
        if steps:
            self._tracker.log_steps(steps)
        for event in events:
            self._note(event)
            self._show(event)

    def _note(self, event: Event) -> None:
        match event:
            case Started():
                self._world_sizes.append(event.world_size)
                self._tracker.tag({"world_sizes": ",".join(map(str, self._world_sizes))})
            case Committed():
                self._tracker.record_checkpoint(event.uri, event.step, event.to_metrics())
            case Removed():
                self._tracker.forget_checkpoint(event.uri)
            case Refused():
                self.refused = event.problems
            case _:
                pass
