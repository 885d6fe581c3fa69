"""Copies in memory: how often, by what they cost; and none where there can be no room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastrata.checkpoints.retention import CheckpointConfig
from elastrata.checkpoints.staging import Stager
from elastrata.step.events import Action, ControlSignal, Warned
from elastrata.step.records import StepRecord
from elastrata.trainer.checkpoint_manager import CheckpointManager, CopyInterval, MemoryCopies
from elastrata.trainer.reporter import Reporter
from elastrata_pipelines.storage import Storage

RECORD = StepRecord(
    step=1, samples=1, tokens=1, loss=1.0, terms={}, metrics={}, lr=0.1, gradient_norm=1.0,
    digest="", world_size=1, micro_batches=1, batch_samples=1, batch_tokens=1, seconds=1.0,
    seconds_waiting_for_data=0.0, seconds_collating=0.0, seconds_in_model=1.0,
    seconds_in_optimizer=0.0, padding=0.0, imbalance=1.0, memory_bytes=1, flops=1, mfu=None,
)  # fmt: skip
STATE = {"model": {"weight": torch.ones(100)}}


class NodeStorage(Storage):
    """Files on a disk in the place of memory."""

    node = "here"


class Heard:
    """A channel that keeps what it is sent."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def send(self, event: Any) -> None:
        self.events.append(event)

    def look(self) -> ControlSignal | None:
        return None

    def flush(self) -> None:
        pass


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("cost", "beside", "expected"),
    [(0.01, [], 2), (0.049, [], 3), (0.04, [1.0, 1.049], 5), (0.0, [1.09], 5), (5.0, [], 10)],
)
def test_the_interval_is_what_a_copy_costs_and_never_above_its_bound(
    cost: float, beside: list[float], expected: int
) -> None:
    interval = CopyInterval(10)
    assert interval.steps == 10
    for _ in range(3):
        interval.add_step(1.0, beside=False)
    interval.start_copy(cost)
    for seconds in beside:
        interval.add_step(seconds, beside=True)
    assert interval.steps == expected


@pytest.mark.usefixtures("alone")
def test_a_copy_that_never_fits_is_not_tried_and_told_once(tmp_path: Path) -> None:
    channel = Heard()
    for hot_bytes, copies in ((799, 0), (800, 1)):
        channel.events.clear()
        replicas = NodeStorage(str(tmp_path / f"memory{hot_bytes}"))
        run = Storage(str(tmp_path / f"run{hot_bytes}"))
        manager = CheckpointManager(
            run,
            replicas,  # type: ignore[arg-type]
            Reporter(run, channel, attempt=1, rank=0),
            attempt=1,
            config=CheckpointConfig(hot_steps=2, hot_bytes=hot_bytes),
            state=lambda: STATE,
        )
        with manager:
            for step in (1, 2, 3):
                manager.save(replace(RECORD, step=step), Action.GO_ON, is_last=False)
            manager.leave()
        warnings = [event.text for event in channel.events if isinstance(event, Warned)]
        assert len(replicas.names()) == copies
        assert len(warnings) == 1 - copies
        assert all(
            "checkpoint.hot_bytes: 799: no in-memory checkpoints" in line for line in warnings
        )


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("adapts", [False, True])
def test_copies_come_as_often_as_is_agreed(tmp_path: Path, adapts: bool) -> None:
    copies = MemoryCopies(
        NodeStorage(str(tmp_path)),  # type: ignore[arg-type]
        attempt=1,
        config=CheckpointConfig(hot_steps=8),
        stager=Stager(),
        adapts=adapts,
        warn=pytest.fail,
    )
    made = []
    for step in range(1, 17):
        copies.add_step(replace(RECORD, step=step, seconds=1e6))
        if copies.is_due(step):
            copies.copy(step, lambda saver: 0.0)
            made.append(step)
    assert made == ([4, 8, 10, 12, 14, 16] if adapts else [4, 8, 12, 16])
    copies.saver.close()
