"""What a machine lacks of what a recipe asks for: told in one line, once for a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastrata.cluster.failure_attribution import FailureCount
from elastrata.device.capabilities import DeviceCapabilities, capabilities, substitutions
from elastrata.driver.recorder import Observer
from elastrata.run import history
from elastrata.step.events import Event, Started, Substituted
from elastrata.tracking.tracker import TrackingConfig, open_tracker
from elastrata_pipelines.storage import Storage
from support.empty_store import put_empty_store

ALL = DeviceCapabilities(device="a GPU", capability=(9, 0), has_bf16=True, missing_compiler=None)
POOR = DeviceCapabilities(
    device="this CPU", capability=None, has_bf16=False, missing_compiler="g++"
)
BF16, FP32 = torch.bfloat16, torch.float32


def test_a_line_for_each_thing_that_is_missing() -> None:
    assert substitutions(POOR, dtype=BF16, compile=True) == [
        "precision: bf16: this CPU has no instructions for it; PyTorch converts to and from fp32 "
        "instead, which is slow",
        "compile: true: g++ is not on PATH; operators run one by one instead",
    ]
    (kernels,) = substitutions(POOR, dtype=FP32, compile=False, skip_zeros=True)
    assert kernels.startswith("sparsity.kernels: true: this CPU has no 2:4 kernels")
    assert not substitutions(
        replace(ALL, skips_zeros=True), dtype=BF16, compile=True, skip_zeros=True
    )
    old = replace(ALL, device="a Tesla V100", capability=(7, 0), has_bf16=False)
    (line,) = substitutions(old, dtype=BF16, compile=True)
    assert line.startswith("precision: bf16: a Tesla V100 has no instructions")


def test_the_compiler_is_looked_for_where_torch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not capabilities(cpu).can_compile
    monkeypatch.setenv("CXX", sys.executable)
    assert capabilities(cpu).can_compile
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert capabilities(cpu).missing_compiler == "no-such-compiler"


def test_every_group_says_it_the_user_hears_it_once(tmp_path: Path) -> None:
    """Also after the driver was started again, which knows it from the history."""
    shown: list[Event] = []
    put_empty_store(tmp_path)
    storage = Storage(str(tmp_path))
    tracker = open_tracker(
        TrackingConfig(), storage, run_name="run", run_id=None, params={}, tags={}
    )

    def group(attempt: int) -> list[Event]:
        started = Started(attempt=attempt, world_size=2, step=0, state="new", pids={}, seconds={})
        return [started, Substituted(text="one"), Substituted(text="other")]

    def told() -> list[tuple[int, str]]:
        entries = history.read_entries(storage.sub("history"))
        return [(e["attempt"], e["text"]) for e in entries if e["kind"] == "substituted"]

    for launch in (1, 3):
        writer = history.HistoryWriter(storage.sub("history"), launch, pytest.fail, writer="d")
        before = [text for _, text in told()]
        observer = Observer(
            tracker, writer, FailureCount(-1), shown.append, [], step=0, substituted=before
        )
        observer([*group(launch), *group(launch + 1)])
    observer([Substituted(text="on another device")])
    tracker.finish("FINISHED")
    assert sum(isinstance(event, Started) for event in shown) == 4
    lines = [event.text for event in shown if isinstance(event, Substituted)]
    assert lines == ["one", "other", "on another device"]
    assert told() == [(1, "one"), (1, "other"), (4, "on another device")]
