"""Failures: who is named when a group has ended, what is counted, what the history has of it."""

from __future__ import annotations

import os
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from elastrata.cluster.channel import Receiver
from elastrata.cluster.failure_attribution import (
    FailureCount,
    Repetition,
    creation_error,
    find_culprits,
    is_victim,
)
from elastrata.driver.recorder import Observer
from elastrata.run import history
from elastrata.step.events import Evaluated, Event, Lost, Slowed, Stalled, Started, Warned
from elastrata.step.records import StepRecord
from elastrata.tracking.tracker import TrackingConfig, open_tracker
from elastrata_pipelines.storage import Storage
from support.empty_store import put_empty_store
from support.histories import record
from support.leaving_ranks import FAILING, error_of
from support.ranks import run_fresh_ranks


def test_the_rank_that_failed_is_named_not_those_that_waited_for_it() -> None:
    """Real errors of real ranks."""
    errors = dict(enumerate(run_fresh_ranks(3, error_of)))
    assert all(isinstance(error, Exception) for error in errors.values())
    assert list(find_culprits(errors)) == [FAILING]


def test_errors_of_nccl_are_victims_those_of_a_model_are_not() -> None:
    victims: list[Exception] = [
        dist.DistBackendError("NCCL communicator was aborted on rank 3"),
        dist.DistNetworkError("the store is gone"),
    ]
    own = [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("gloo"),
        _error_of_a_missing_backend(),
    ]
    assert all(map(is_victim, victims))
    assert not any(map(is_victim, own))
    assert find_culprits(dict(enumerate(victims))) == dict(enumerate(victims)), (
        "none is left to name"
    )


def _error_of_a_missing_backend() -> Exception:
    """Every build of PyTorch lacks one of them."""
    missing = "xccl" if dist.is_nccl_available() else "nccl"
    store = dist.HashStore()  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="built in") as caught:
        dist.init_process_group(missing, store=store, rank=0, world_size=1)
    return caught.value


def test_losses_are_counted_once_an_attempt_until_none_is_left() -> None:
    failures, any_number = FailureCount(2), FailureCount(-1)
    assert [failures.lose(attempt) for attempt in (4, 4, 5)] == [True, False, True]
    assert (failures.count, failures.left, failures.is_last) == (2, 0, True)
    assert all(any_number.lose(attempt) for attempt in range(50))
    assert (any_number.left, any_number.is_last) == (-1, False)


def test_a_mistake_that_ends_two_groups_at_one_step_would_end_every_group() -> None:
    def verdicts(*errors: tuple[Exception, int]) -> list[bool]:
        repetition = Repetition()
        return [repetition.is_certain(error, step) for error, step in errors]

    missing = ImportError("no module 'mine'")
    assert verdicts((missing, 0), (ImportError("no module 'mine'"), 0)) == [False, True]
    assert verdicts((missing, 0), (missing, 30), (missing, 60)) == [False] * 3
    assert verdicts((missing, 0), (ValueError("no module 'mine'"), 0), (missing, 0)) == [False] * 3
    for error in (OSError("disk"), RuntimeError("NCCL"), torch.OutOfMemoryError("8 GiB")):
        assert verdicts((error, 0), (error, 0), (error, 0)) == [False] * 3


def test_controllers_that_never_start_workers_are_counted() -> None:
    failures = FailureCount(2)
    assert failures.lose(0)
    failures.lose_controller()
    assert not failures.lose(0)
    assert failures.is_last


@ray.remote(num_cpus=0)
class _Broken:
    def __init__(self) -> None:
        raise ImportError("cannot import name 'nn' from 'torch' (torch.py)")

    def take(self, seconds: float, ticket: str) -> None:
        pass


@ray.remote(num_cpus=0)
class _Whole:
    def die(self) -> None:
        os._exit(1)


def test_a_process_that_cannot_be_made_is_told_with_its_cause(ray_local: None) -> None:
    told: Queue[str] = Queue()
    receiver = Receiver(_Broken.remote(), pytest.fail, told.put)  # type: ignore[attr-defined]
    line = told.get()
    receiver.close()
    assert line == (
        "processes of the run cannot start: ImportError: cannot import name 'nn' from 'torch' "
        "(torch.py)"
    )
    with pytest.raises(ray.exceptions.RayActorError) as caught:
        ray.get(_Whole.remote().die.remote())  # type: ignore[attr-defined]
    assert creation_error(caught.value) is None


@pytest.fixture
def observed(tmp_path: Path) -> Any:
    """An observer of a run that a driver before has led to step 20, what it shows, and the run's
    history."""
    put_empty_store(tmp_path)
    storage, shown = Storage(str(tmp_path)), list[Event]()
    tracker = open_tracker(
        TrackingConfig(), storage, run_name="run", run_id=None, params={}, tags={}
    )
    past = storage.sub("history")
    writer = history.HistoryWriter(past, 1, pytest.fail, writer="d")
    observer = Observer(
        tracker, writer, FailureCount(3), shown.append, [2], step=20, substituted=[]
    )
    yield observer, past, shown
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
    undone = [entry for entry in history.read_entries(past) if entry["kind"] == "rolled_back"]
    assert [(e["attempt"], e["first"], e["last"]) for e in undone] == [(2, 16, 20), (3, 31, 33)]


def test_a_loss_that_is_seen_twice_is_one(observed: Any) -> None:
    observer, past, _ = observed
    observer([started(2, 20)])
    observer([Lost(text="no progress by the workers", ranks=())])
    observer([Lost(text="rank 0: its process is gone", ranks=(0,))])
    observer([started(3, 20), Lost(text="rank 1: its process is gone", ranks=(1,))])
    faults = [entry for entry in history.read_entries(past) if entry["kind"] == "fault"]
    assert [(e["attempt"], e["text"]) for e in faults] == [
        (2, "no progress by the workers"),
        (3, "rank 1: its process is gone"),
    ]


def test_what_the_channel_delivers_again_is_dropped(observed: Any) -> None:
    """By attempt and step: steps that are done again after a loss are others."""
    observer, past, shown = observed
    slow = [
        Slowed(step=24, rank=rank, node="n", host="h", device="CPU", factor=0.5, since=9)
        for rank in (0, 1)
    ]
    evaluated = Evaluated(step=22, loss=1.0, metrics={}, seconds=1.0)
    batch = [started(2, 20), *steps(21, 24), evaluated, Stalled(step=22, seconds=1.0), *slow]
    for events in (batch, batch, [*batch[3:], *steps(25, 26)]):
        observer(events)
    again = [started(3, 24), *steps(25, 26), Warned(text="of no step")]
    observer(again)
    assert shown == [*batch, *steps(25, 26), *again]
    assert len([entry for entry in history.read_entries(past) if entry["kind"] == "slowed"]) == 2
