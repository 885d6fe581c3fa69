"""A run of `elastrata train` that is watched, disturbed, and looked at afterwards."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import start, wait_until

GROUP = "training on"
RELATIVE = 1e-4
"""fp32 sums in another order differ by some 1e-7 each; AdamW adds that up over the steps."""
_STEP = re.compile(r"^step +(\d+)/", re.MULTILINE)


class LiveRun:
    """One launch of a run; its output goes into a file.

    Args:
        recipe: the recipe's file; runs lie in the folder `runs` beside it.
        name: of the run.
        log: file for the output; continued by later launches.
        arguments: more of them for `elastrata train`.
    """

    def __init__(self, recipe: Path, name: str, log: Path, *arguments: str) -> None:
        self._log = log
        self._storage = Storage(str(recipe.parent / "runs" / name / "history"))
        self.driver = start("train", recipe, "--name", name, *arguments, log=log)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace", encoding="utf-8")

    def groups(self) -> int:
        """How many groups of workers have been ready for a step."""
        return sum(line.startswith(GROUP) for line in self.output.splitlines())

    def wait_for_group(self, number: int, steps: int = 30, seconds: float = 600) -> None:
        """Waits until the `number`-th group of workers, or a later one, has taken so many steps."""

        def has_stepped() -> bool:
            if self.driver.poll() is not None:
                raise AssertionError(f"ended with {self.driver.returncode}:\n{self.output}")
            groups = self.output.split(f"\n{GROUP}")[number:]
            shown = [[int(step) for step in _STEP.findall(group)] for group in groups]
            return any(found and found[-1] - found[0] >= steps for found in shown)

        wait_until(has_stepped, seconds, f"steps of group {number}\n{self.output}")

    def wait_for_checkpoint(self, seconds: float = 600) -> None:
        """Waits until this launch has taken a checkpoint."""
        wait_until(lambda: "\ncheckpoint of step" in self.output, seconds, "a checkpoint")

    def wait_for_more(self, steps: int) -> None:
        """Wait until `steps` more steps are done than now."""
        self.wait_for_step(self._last_step() + steps)

    def wait_for_step(self, step: int, seconds: float = 600) -> None:
        """Wait until a step has been shown that is `step` or a later one."""

        def has_come() -> bool:
            if self.driver.poll() is not None:
                raise AssertionError(f"ended with {self.driver.returncode}:\n{self.output}")
            return self._last_step() >= step

        wait_until(has_come, seconds, f"step {step}")

    def _last_step(self) -> int:
        return max(map(int, _STEP.findall(self.output)), default=0)

    def wait_for_size(self, workers: int, number: int, steps: int, seconds: float = 600) -> None:
        """Waits until the newest group, the `number`-th or a later one, has so many workers and has
        taken so many steps."""

        def has_settled() -> bool:
            if self.driver.poll() is not None:
                raise AssertionError(f"ended with {self.driver.returncode}:\n{self.output}")
            groups = self.output.split(f"\n{GROUP}")[1:]
            if len(groups) < number or int(groups[-1].split()[0]) != workers:
                return False
            shown = [int(step) for step in _STEP.findall(groups[-1])]
            return bool(shown) and shown[-1] - shown[0] >= steps

        wait_until(has_settled, seconds, f"{workers} workers, group {number}\n{self.output}")

    def interrupt(self, seconds: float = 600) -> None:
        """End the run with SIGTERM, its state saved."""
        self.send(signal.SIGTERM)
        assert self.driver.wait(timeout=seconds) == 130, self.output

    def end(self, seconds: float = 600) -> None:
        """Waits for the end, which must be a good one."""
        assert self.driver.wait(timeout=seconds) == 0, self.output

    def send(self, number: signal.Signals) -> float:
        """Sends the driver a signal; returns the time."""
        self.driver.send_signal(number)
        return time.time()

    def entries(self) -> list[Any]:
        """The run's history, over all its launches."""
        return history.read_entries(self._storage)

    def of_kind(self, kind: str) -> list[Any]:
        """The entries of one kind in the order of time."""
        found = [entry for entry in self.entries() if entry["kind"] == kind]
        return sorted(found, key=lambda entry: float(entry["time"]))

    def steps(self) -> list[Any]:
        """The steps that made the model."""
        return list(history.effective_steps(self.entries()))

    def rolled_back(self) -> list[int]:
        """How many steps each fault cost, where it cost any."""
        return [entry["last"] - entry["first"] + 1 for entry in self.of_kind("rolled_back")]


def assert_alike(live: LiveRun, undisturbed: list[Any]) -> None:
    """A run took the very steps of another one."""
    steps = live.steps()
    assert [s["step"] for s in steps] == list(range(1, len(undisturbed) + 1))
    assert [s["digest"] for s in steps] == [s["digest"] for s in undisturbed]
    expected = pytest.approx([s["loss"] for s in undisturbed], rel=RELATIVE)
    assert [s["loss"] for s in steps] == expected
