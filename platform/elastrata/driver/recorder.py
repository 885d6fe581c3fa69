"""The observer: the driver's record of a run, from the events that the workers send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from threading import Lock
from typing import Any

from elastrata.cluster.failure_attribution import FailureCount
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


def record_missed_events(
    tracker: Tracker, entries: Iterable[Mapping[str, Any]], checkpoints: Sequence[Committed]
) -> None:
    """Record the events that a dead driver missed: steps of the history, checkpoints on storage.

    Args:
        tracker: tracker of the run.
        entries: the run's whole history.
        checkpoints: all checkpoints of the run, oldest first.
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


def _ignore(event: Event) -> None:
    """No-op default for `show`."""


class Observer:
    """Records events in MLflow and the history, passes them on to `show`, and tracks the run's
    state.

    Any thread may call it.

    Args:
        tracker: tracker of the run.
        history: writer of the run's history.
        failures: losses of this launch, counted here.
        show: called with every event.
        world_sizes: world sizes of the groups of workers before this launch.
        step: the last of their steps that counts.
        substituted: lines about substitutions that were already reported.
    """

    def __init__(
        self,
        tracker: Tracker,
        history: HistoryWriter,
        failures: FailureCount,
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
        self._newest_by_kind: dict[tuple[type[Event], int | None], int] = {}
        self._step = step
        self._heard_at = time.monotonic()
        self._substituted = list(substituted)
        self._failures = failures
        self._lock = Lock()
        self.refused: tuple[str, ...] = ()

    @property
    def attempt(self) -> int:
        """The newest group of workers that has started, counted over the whole run."""
        return self._attempt

    def __call__(self, events: Sequence[Event]) -> None:
        """Handle events in the order in which they happened."""
        with self._lock:
            self._handle(events)

    def _handle(self, events: Sequence[Event]) -> None:
        rows, to_show = [], []
        for event in events:
            if not self._is_new(event):
                continue
            if isinstance(event, StepRecord | Evaluated | Stalled):
                rows.append({"step": event.step, **event.to_metrics()})
            if self._record(event):
                to_show.append(event)
        if rows:
            self._tracker.log_steps(rows)
        for event in to_show:
            self._show_safely(event)

    def _is_new(self, event: Event) -> bool:
        """Return False for an event of this attempt that was already handled."""
        match event:
            case Started():
                # The channel delivers at least once, and repeats undelivered events after a
                # restart.
                if event.attempt <= self._attempt:
                    return False
                # Step numbers repeat after a restart.
                self._attempt, self._newest_by_kind = event.attempt, {}
            case StepRecord() | Evaluated() | Stalled() | Paced() | Slowed():
                kind = type(event), event.rank if isinstance(event, Slowed) else None
                if event.step <= self._newest_by_kind.get(kind, -1):
                    return False
                self._newest_by_kind[kind] = event.step
        return True

    def _show_safely(self, event: Event) -> None:
        """Show an event; stop showing if that fails."""
        try:
            self._show(event)
        # A closed terminal, as after `| head`, must not end the record.
        except (Exception, SystemExit):
            self._show = _ignore

    def _record(self, event: Event) -> bool:
        """Record an event; return True if it has yet to be shown to the user."""
        match event:
            case StepRecord():
                self._step, self._heard_at = event.step, time.monotonic()
            case Started():
                self._heard_at = time.monotonic()
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
        """Record which steps are done again."""
        # This counts only steps that the driver heard of: the ones that rank 0 had neither written
        # into the history nor sent died with it.
        if self._step > step:
            undone = {"first": step + 1, "last": self._step}
            self._history.add("rolled_back", {"attempt": self._attempt, **undone})
            self._history.flush()
        self._step = step

    def _substitute(self, line: str) -> bool:
        """Record a line about a substitution; return False if it was already recorded."""
        # Every group of workers reports its substitutions anew.
        if line in self._substituted:
            return False
        self._substituted.append(line)
        self._history.add("substituted", {"attempt": self._attempt, "text": line})
        self._history.flush()
        self._tracker.tag({"substituted": "\n".join(self._substituted)})
        return True

    def _lose(self, event: Lost) -> None:
        """Record the loss of a group, once."""
        # One loss may be reported in several ways.
        if self._failures.lose(self._attempt):
            fault = {
                "text": event.text,
                "ranks": list(event.ranks),
                "seconds_unheard": round(time.monotonic() - self._heard_at, 3),
            }
            self._history.add("fault", {"attempt": self._attempt, **fault})
            self._history.flush()
