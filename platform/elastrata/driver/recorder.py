"""The observer: the driver's record of a run, from the events that the workers send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from threading import Lock
from typing import Any

from elastrata.cluster.failure_attribution import Failures
from elastrata.run.entries import metrics_of, step_record
from elastrata.run.history import HistoryWriter
from elastrata.step.events import (
    Chosen,
    Committed,
    Evaluated,
    Event,
    Lost,
    Paced,
    RanOut,
    Refused,
    Removed,
    Slowed,
    Stalled,
    Started,
    Substituted,
)
from elastrata.step.records import StepRecord
from elastrata.tracking.tracker import Tracker


def catch_up(
    tracker: Tracker, entries: Iterable[Mapping[str, Any]], checkpoints: Sequence[Committed]
) -> None:
    """Records what a driver that died did not: steps of the history, checkpoints on storage.

    Args:
        tracker: of the run.
        entries: its whole history.
        checkpoints: all that there are, the oldest first.
    """
    metrics = []
    for entry in entries:
        if entry["kind"] == "step":
            record = step_record(entry, "the run's history")
            metrics.append({"step": entry["step"], **record.to_metrics()})
        elif entry["kind"] == "evaluated":
            metrics.append({"step": entry["step"], **metrics_of(entry)})
    tracker.log_steps(metrics)
    tracker.keep_checkpoints([checkpoint.uri for checkpoint in checkpoints])
    for checkpoint in checkpoints:
        tracker.record_checkpoint(checkpoint.uri, checkpoint.step, checkpoint.to_metrics())


def _nothing(event: Event) -> None:
    """Shows an event to nobody."""


class Observer:
    """Passes events on to MLflow and to whoever shows progress, and remembers how the run stands.

    Args:
        tracker: of the run.
        history: of the run, written by the driver.
        failures: of this launch, counted here.
        show: called with every event.
        world_sizes: of the groups of workers before this launch.
        step: the last one they did that counts.
        substituted: what was used instead of what the recipe asks for, line by line.

    Any thread may call it.
    """

    def __init__(
        self,
        tracker: Tracker,
        history: HistoryWriter,
        failures: Failures,
        show: Callable[[Event], None],
        world_sizes: Sequence[int],
        step: int,
        substituted: Sequence[str],
    ) -> None:
        self._tracker = tracker
        self._history = history
        self._show = show
        self._world_sizes = list(world_sizes)
        self._attempt = 0
        self._seen: dict[tuple[type[Event], int | None], int] = {}
        self._step = step
        self._heard = time.monotonic()
        self._substituted = list(substituted)
        self._failures = failures
        self._lock = Lock()
        self.refused: tuple[str, ...] = ()

    def __call__(self, events: Sequence[Event]) -> None:
        """Handles events in the order they happened."""
        with self._lock:
            self._handle(events)

    def _handle(self, events: Sequence[Event]) -> None:
        steps, shown = [], []
        for event in events:
            if not self._is_new(event):
                continue
            if isinstance(event, StepRecord | Evaluated | Stalled):
                steps.append({"step": event.step, **event.to_metrics()})
            if self._note(event):
                shown.append(event)
        if steps:
            self._tracker.log_steps(steps)
        for event in shown:
            self._show_safely(event)

    def _is_new(self, event: Event) -> bool:
        """Return False for an event of a step of this attempt that has come before: the channel
        delivers at least once, and again what was on its way when it was replaced."""
        match event:
            case Started():
                if event.attempt <= self._attempt:
                    return False
                self._attempt, self._seen = event.attempt, {}
            case StepRecord() | Evaluated() | Stalled() | Paced() | Slowed():
                kind = type(event), event.rank if isinstance(event, Slowed) else None
                if event.step <= self._seen.get(kind, -1):
                    return False
                self._seen[kind] = event.step
        return True

    def _show_safely(self, event: Event) -> None:
        """A terminal that is gone, as after `| head`, must not end the record."""
        try:
            self._show(event)
        except (Exception, SystemExit):
            self._show = _nothing

    def _note(self, event: Event) -> bool:
        """Notes what is to stay of an event; returns whether the user has yet to hear of it."""
        match event:
            case StepRecord():
                self._step, self._heard = event.step, time.monotonic()
            case Started():
                self._heard = time.monotonic()
                self._roll_back(event.step)
                self._world_sizes.append(event.world_size)
                self._tracker.tag({"world_sizes": ",".join(map(str, self._world_sizes))})
            case Committed():
                self._tracker.record_checkpoint(event.uri, event.step, event.to_metrics())
            case Removed():
                self._tracker.forget_checkpoint(event.uri)
            case Lost():
                self._lose(event)
            case Substituted():
                return self._substitute(event.text)
            case Chosen():
                keys: tuple[str, ...] = ("micro_batch_tokens", "activation_checkpointing")
                keys += ("gradient_sync",) if event.gradient_sync != "step" else ()
                self._tracker.tag({f"chosen.{key}": vars(event)[key] for key in keys})
            case Slowed():
                self._history.add("slowed", {"attempt": self._attempt, **asdict(event)})
                self._history.flush()
            case Paced():
                self._history.add("paced", {"attempt": self._attempt, **asdict(event)})
            case RanOut():
                self._history.add("ran_out", {"attempt": self._attempt, **asdict(event)})
                self._history.flush()
            case Refused():
                self.refused = event.problems
            case _:
                pass
        return True

    def _roll_back(self, step: int) -> None:
        """Notes which steps are done again, as far as the driver has heard of them: what rank 0 had
        not yet written into the history died with it, and so did what it had not yet sent."""
        if self._step > step:
            undone = {"first": step + 1, "last": self._step}
            self._history.add("rolled_back", {"attempt": self._attempt, **undone})
            self._history.flush()
        self._step = step

    def _substitute(self, line: str) -> bool:
        """Notes a line that every group of workers says anew; returns whether it is the first."""
        if line in self._substituted:
            return False
        self._substituted.append(line)
        self._history.add("substituted", {"attempt": self._attempt, "text": line})
        self._history.flush()
        self._tracker.tag({"substituted": "\n".join(self._substituted)})
        return True

    def _lose(self, event: Lost) -> None:
        """Notes that a group is lost; once, as one loss may be seen in several ways."""
        if self._failures.lose(self._attempt):
            fault = {
                "text": event.text,
                "ranks": list(event.ranks),
                "seconds_unheard": round(time.monotonic() - self._heard, 3),
            }
            self._history.add("fault", {"attempt": self._attempt, **fault})
            self._history.flush()
