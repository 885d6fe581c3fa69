"""Steps that were done and are on no record: what is known of them is told as a lower bound."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from elastrata.cli.main import run
from elastrata.cluster.failure_attribution import FailureCount
from elastrata.driver.interrupt import Interrupt
from elastrata.driver.launch import _owned
from elastrata.driver.recorder import Observer
from elastrata.run import history
from elastrata.run.consistency import check_continuation
from elastrata.run.history import HistoryWriter
from elastrata.run.ownership import NewestStep, own_run
from elastrata.run.status import status
from elastrata.run.timeline import newest_known_step
from elastrata.step.events import Started
from elastrata.tracking.tracker import SilentTracker
from elastrata_pipelines.storage import Storage
from support.forks import fork
from support.histories import record, write_run

DONE, RECORDED = 40, 1


def _train_until_killed(folder: str) -> None:
    """Trains 40 steps, of which the history gets the first, and is killed."""
    history.PART_SECONDS = float("inf")
    run = Storage(folder)
    group = HistoryWriter(run.sub("history"), 1, print)
    with own_run(run, lost=print, beat_seconds=0.05) as ownership:
        group.add("started", {"step": 0, "world_size": 1, "state": "new"})
        group.add("step", record(1).to_dict())
        group.flush()
        for step in range(2, DONE + 1):
            group.add("step", record(step).to_dict())
        beat = ownership.owner.beat
        ownership.note(NewestStep(step=DONE, samples=840, tokens=4_000, loss=0.1))
        while ownership.owner.beat < beat + 2:
            ownership._ending.wait(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def killed(tmp_path: Path) -> Storage:
    """The folder of a run whose driver was killed after 40 steps, 39 of them unrecorded."""
    write_run(tmp_path / "run", [], steps=60)
    process = fork(_train_until_killed, str(tmp_path / "run"))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return Storage(str(tmp_path / "run"))


def _go_on(run: Storage) -> None:
    """What a launch does until the second group has done its first step."""
    with _owned(run, Interrupt(), lambda event: None, None):
        entries = history.read_entries(run.sub("history"))
        driver = HistoryWriter(run.sub("history"), 2, pytest.fail, writer="d")
        observer = Observer(
            SilentTracker(),
            driver,
            FailureCount(3),
            lambda event: None,
            [1],
            step=newest_known_step(entries, RECORDED),
            substituted=[],
        )
        begun = {"attempt": 2, "world_size": 1, "step": 0}
        group = HistoryWriter(run.sub("history"), 2, pytest.fail)
        group.add("started", {"step": 0, "world_size": 1, "state": "new"})
        observer([Started(state="new", pids={}, seconds={}, **begun)])
        group.add("step", record(1).to_dict())
        group.flush()


def test_what_a_killed_driver_had_heard_of_is_done_again(
    killed: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    check_continuation(killed, said.append)
    assert said == [
        "resuming from the first step, because there is no checkpoint; the history has steps up to "
        f"{RECORDED}, and the driver had received step {DONE}"
    ]
    before = status(killed)
    assert (before.state, before.steps) == ("silent", RECORDED)
    assert f"at least up to step {DONE}, on record up to step {RECORDED}" in before.text

    _go_on(killed)

    assert run(["status", killed.url, "--json"]) == 0
    captured = capsys.readouterr()
    (recovery,) = json.loads(captured.out)["recoveries"]
    assert (recovery["cause"], recovery["steps_rolled_back"]) == ("fault", DONE)
    assert (recovery["at_least"], recovery["seconds_rolled_back"]) == (True, 1.0)
    assert recovery["seconds_unrecorded"] == history.PART_SECONDS
    shown = "".join(captured.err.split())
    again = f"at least {DONE} steps repeated (1.0 s recorded; up to 15.0 s before the loss"
    assert "".join(again.split()) in shown

    run(["audit", killed.url, "--json"])
    captured = capsys.readouterr()
    first, second = json.loads(captured.out)["attempts"]
    assert (first["rolled_back"], first["at_least"]) == (DONE, True)
    assert (second["rolled_back"], second["at_least"]) == (0, False)
    assert f"at least {DONE}" in captured.err
