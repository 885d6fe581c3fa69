"""The observer: what it writes into the history about groups that were lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastrata.cluster.failures import Failures
from elastrata.cluster.observer import Observer
from elastrata.core.events import Event, Lost, Started
from elastrata.core.record import StepRecord
from elastrata.run import history
from elastrata.tracking.tracker import TrackingConfig, open_tracker
from elastrata_pipelines.storage import Storage
from support.empty_store import put_empty_store
from support.histories import record


@pytest.fixture
def observed(tmp_path: Path) -> Any:
    """An observer of a run that a driver before has led to step 20, and the run's history."""
    put_empty_store(tmp_path)
    storage = Storage(str(tmp_path))
    tracker = open_tracker(
        TrackingConfig(), storage, run_name="run", run_id=None, params={}, tags={}
    )
    past = storage.sub("history")
    writer = history.HistoryWriter(past, 1, pytest.fail, writer="d")
    failures = Failures(3)
    observer = Observer(tracker, writer, failures, lambda _: None, [2], step=20, substituted=[])
    yield observer, past, failures
    tracker.finish("FINISHED")


def started(attempt: int, step: int) -> Event:
    return Started(attempt=attempt, world_size=2, step=step, state="hot", pids={}, seconds={})


def steps(first: int, last: int) -> list[StepRecord]:
    return [record(step) for step in range(first, last + 1)]


def test_what_was_heard_of_and_is_done_again(observed: Any) -> None:
    observer, past, _ = observed
    observer([started(2, 15), *steps(16, 33)])
    observer([Lost(text="rank 1 was killed", ranks=(1,))])
    observer([started(3, 30), *steps(31, 40)])
    observer([started(4, 40)])
    undone = [entry for entry in history.read(past) if entry["kind"] == "rolled_back"]
    assert [(e["attempt"], e["first"], e["last"]) for e in undone] == [(2, 16, 20), (3, 31, 33)]


def test_a_loss_that_is_seen_twice_is_one(observed: Any) -> None:
    observer, past, failures = observed
    observer([started(2, 20)])
    observer([Lost(text="no sign of the workers", ranks=())])
    observer([Lost(text="rank 0: its process is gone", ranks=(0,))])
    observer([started(3, 20), Lost(text="rank 1: its process is gone", ranks=(1,))])
    faults = [entry for entry in history.read(past) if entry["kind"] == "fault"]
    assert [(e["attempt"], e["text"]) for e in faults] == [
        (2, "no sign of the workers"),
        (3, "rank 1: its process is gone"),
    ]
    assert (failures.count, failures.left) == (2, 1)
