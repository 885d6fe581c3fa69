"""The status: what a run's folder says about how the run stands, and what faults have cost it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli.main import run
from elastrata.run.ownership import Driver, NewestStep
from elastrata.run.status import SILENT_SECONDS, Status, run_state, summary
from elastrata.run.timeline import recoveries
from support.documented import documented_keys
from support.histories import Entry, said, started, stepped, write_run

LONG_AGO = 1_700_000_000.0
"""Unix time of the first start in these histories: 14 November 2023."""
DEAD, ALIVE, UNKNOWN = Driver(alive=False), Driver(alive=True), Driver()


def _steps(attempt: int, first: int, last: int, *, time: float, **more: Any) -> list[Entry]:
    """A step every second, the first done at `time`."""
    return [stepped(attempt, n, time=time + n - first, **more) for n in range(first, last + 1)]


def _killed_and_resized() -> list[Entry]:
    """Ten steps; a worker is lost, two steps are rolled back; a planned resize; 20 steps in all."""
    t = LONG_AGO
    return [
        started(1, 0, time=t, state="new", seconds={"model": 4.0}),
        *_steps(1, 1, 10, time=t + 1),
        said("fault", 1, time=t + 12, text="rank 1 was killed [SIGKILL]", ranks=[1]),
        started(2, 8, time=t + 19, state="hot", world_size=1),
        said("rolled_back", 2, time=t + 19, first=9, last=10),
        *_steps(2, 9, 15, time=t + 20),
        said("halted", 2, time=t + 27, step=15, reason="resize", text="a node has come"),
        started(3, 15, time=t + 31, state="hot", world_size=3),
        *_steps(3, 16, 20, time=t + 32),
    ]


def _summary(entries: list[Entry], driver: Driver = UNKNOWN, **changes: Any) -> Status:
    values: dict[str, Any] = {
        "steps_in_all": 40,
        "target": None,
        "checkpoint": None,
        "now": LONG_AGO + 40,
    }
    return summary("runs/one", entries, driver=driver, **{**values, **changes})


def test_recoveries_cost_the_time_without_steps_and_the_steps_rolled_back() -> None:
    fault, resize = recoveries(_killed_and_resized())
    assert (fault.attempt, fault.cause, fault.state, fault.world_size) == (2, "fault", "hot", 1)
    assert (fault.time, fault.seconds) == (LONG_AGO + 10, 10)
    assert (fault.steps_rolled_back, fault.seconds_rolled_back) == (2, 2.0)
    assert (resize.cause, resize.seconds, resize.steps_rolled_back) == ("resize", 6, 0)


def test_the_time_between_two_launches_is_not_lost() -> None:
    day = 86_400.0
    entries = [
        started(1, 0, time=LONG_AGO),
        *_steps(1, 1, 5, time=LONG_AGO + 1),
        said("ended", 1, time=LONG_AGO + 8, status="FAILED", text="no workers left"),
        started(2, 5, time=LONG_AGO + day, seconds={"model": 3.0}),
        *_steps(2, 6, 7, time=LONG_AGO + day + 1),
    ]
    (recovery,) = recoveries(entries)
    assert recovery.cause == "restart"
    assert recovery.seconds == pytest.approx(3 + 3 + 1)
    assert _summary(entries).seconds_in_all == pytest.approx(8 + 3 + 2)


@pytest.mark.parametrize(
    ("status", "text", "state", "shown"),
    [
        ("FINISHED", "", "finished", "finished"),
        ("KILLED", "SIGTERM", "stopped", "stopped: SIGTERM"),
        ("FAILED", "no workers left", "failed", "failed: no workers left"),
    ],
)
def test_a_run_that_ended_says_how(status: str, text: str, state: str, shown: str) -> None:
    end = said("ended", 3, time=LONG_AGO + 50, status=status, text=text)
    entries = [*_killed_and_resized(), end]
    late = LONG_AGO + 10_000
    for driver in (DEAD, UNKNOWN, Driver(alive=True, since=LONG_AGO - 5)):
        assert run_state(entries, done=False, driver=driver, now=late) == (state, shown)
    again = Driver(alive=True, since=LONG_AGO + 60)
    assert run_state(entries, done=False, driver=again, now=late)[0] == "running"
    entries.append(started(4, 20, time=LONG_AGO + 70))
    assert run_state(entries, done=False, driver=DEAD, now=late)[0] == "silent"


def test_a_run_that_gives_no_sign_of_life_is_silent() -> None:
    entries, last = _killed_and_resized(), LONG_AGO + 36

    def state(driver: Driver, now: float, *, done: bool = False) -> tuple[str, str]:
        return run_state(entries, done=done, driver=driver, now=now)

    assert state(UNKNOWN, last + SILENT_SECONDS)[0] == "running"
    since = "no sign of life since 2023-11-14 22:13:56 UTC"
    assert state(UNKNOWN, last + SILENT_SECONDS + 1) == ("silent", since)
    assert state(DEAD, last) == ("silent", since)
    assert state(Driver(alive=False, seen=last + 4), last + 9)[1].endswith("22:14:00 UTC")
    assert state(ALIVE, last + 10_000)[0] == "running"
    assert state(UNKNOWN, last + 10_000, done=True)[0] == "finished", "histories of old end so"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "one", _killed_and_resized(), steps=40)
    assert run(["status", str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out
    assert "no sign of life since 2023-11-14 22:13:56 UTC" in shown
    assert "step 20 of 40 (50.0%), 420 samples" in shown
    assert "2 from step 1, 1 from step 9, 3 from step 16" in shown
    assert "18.0 s of 40.0 s (45.0%)" in shown
    assert "2023-11-14 22:13:32 UTC  attempt 1, rank 1: rank 1 was killed [SIGKILL]" in shown
    assert (
        "2023-11-14 22:13:30 UTC  fault: 10.0 s without a step, at least 2 steps repeated "
        "(2.0 s recorded; the last moments before the loss are not recorded), "
        "resumed with 1 worker from hot state (attempt 2)"
    ) in shown
    assert run(["status", str(tmp_path / "one"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == documented_keys("status") == [field.name for field in fields(Status)]
    killed, resized = result["recoveries"]
    assert (killed["steps_rolled_back"], killed["at_least"]) == (2, True)
    assert (resized["steps_rolled_back"], resized["at_least"]) == (0, False)


def test_bad_input_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", str(tmp_path / "none")]) == 2
    assert "no run here (run.json is missing)" in capsys.readouterr().err
    write_run(tmp_path / "one", _killed_and_resized(), steps=40)
    part = tmp_path / "one" / "history" / "0003-00000000.jsonl"
    part.write_text(part.read_text(encoding="utf-8")[:-5], encoding="utf-8")
    assert run(["status", str(tmp_path / "one")]) == 2
    assert f"{part}, line 6: not JSON (truncated or altered)" in capsys.readouterr().err
    (tmp_path / "one" / "recipe.yaml").write_text("steps: many", encoding="utf-8")
    part.unlink()
    assert run(["status", str(tmp_path / "one")]) == 2
    assert "recipe.yaml: damaged: KeyError: 'seed'" in capsys.readouterr().err


def test_a_running_run_is_as_far_as_its_driver_has_said() -> None:
    entries = [started(1, 0, time=LONG_AGO), *_steps(1, 1, 5, time=LONG_AGO + 1)]
    newest = NewestStep(step=9, samples=72, tokens=900, loss=3.5)
    running = _summary(entries, Driver(alive=True, newest=newest))
    assert (running.steps, running.samples_seen, running.tokens_seen) == (9, 72, 900)
    assert (running.loss, running.progress) == (3.5, 9 / 40)
    assert _summary(entries, Driver(alive=False, newest=newest)).steps == 5
    behind = Driver(alive=True, newest=newest.model_copy(update={"step": 4}))
    assert _summary(entries, behind).steps == 5
    not_finite = Driver(alive=True, newest=newest.model_copy(update={"loss": None}))
    assert _summary(entries, not_finite).loss is None
