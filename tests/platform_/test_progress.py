"""Progress: a line that moves on a terminal, lines at intervals elsewhere, words that fit."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from elastrata.step.events import Committed, Started, Warned
from elastrata.sweeps.config import SweepConfig
from elastrata.sweeps.journal import Standings
from elastrata.terminal import progress as progress_module
from elastrata.terminal.progress import Progress
from elastrata.terminal.sweep_progress import SweepProgress
from support.histories import record

RECORD = replace(
    record(1), loss=5.25, seconds=0.5, batch_tokens=10_000, batch_samples=8, world_size=2
)
STARTED = Started(attempt=1, world_size=2, step=0, state="new", pids={}, seconds={})


def _console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=160, highlight=False, _environ={"TERM": "xterm"}
    )
    return console, out


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes, however long a step of the test takes."""
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: 1000.0))


def test_a_line_moves_on_a_terminal_and_is_gone_at_the_end() -> None:
    console, out = _console(terminal=True)
    with Progress(100, console) as progress:
        progress(STARTED)
        progress(Committed(step=40, uri="there", evaluation_loss=None))
        progress(replace(RECORD, step=41))
        progress(Warned(text="something"))
    shown = out.getvalue()  # the last view is drawn before it is wiped away
    for words in ("step 41/100", "loss 5.2500", "20k tokens/s", "2 workers", "checkpoint 40"):
        assert words in shown
    assert "ETA 30s" in shown.replace("29s", "30s")
    assert "checkpoint of step 40: there" in shown
    assert "warning: something" in out.getvalue()


@pytest.mark.usefixtures("stopped_clock")
def test_elsewhere_there_are_few_lines_and_the_first_and_last_step() -> None:
    console, out = _console(terminal=False)
    with Progress(50, console, {3: "phase 2 of 2"}, indent="  ") as progress:
        progress(STARTED)
        for step in range(1, 51):
            progress(replace(RECORD, step=step))
    lines = out.getvalue().splitlines()
    assert lines[0] == "  training on 2 workers (attempt 1)"
    assert lines[1].startswith("  step  1/50  loss  5.2500")
    assert "  phase 2 of 2" in lines
    assert lines[-1].startswith("  step 50/50")
    assert len(lines) == 4


ENTRIES: list[dict[str, Any]] = [
    {"kind": "suggested", "trial": "0000", "values": {"optimizer.lr": 0.01}},
    {"kind": "reported", "trial": "0000", "step": 1, "samples": 8, "tokens": 100, "seconds": 1.0,
     "metrics": {"eval/loss": 5.5}},
    {"kind": "concluded", "trial": "0000", "state": "finished", "text": ""},
]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sweep_is_a_table_on_a_terminal_and_a_line_for_each_trial_elsewhere(
    terminal: bool,
) -> None:
    console, out = _console(terminal=terminal)
    space = {"recipe": "bert/tiny", "space": {"optimizer.lr": {"uniform": [0, 1]}}}
    with SweepProgress(SweepConfig.model_validate(space).space, console) as progress:
        for end in range(1, len(ENTRIES) + 1):
            progress(Standings("eval/loss", "min", ENTRIES[:end]))
        progress.warn("something")
    shown = out.getvalue()
    line = "trial 0000 finished: eval/loss 5.5000 after 100 tokens, the best so far"
    assert (line in shown, shown.count("something")) == (not terminal, 1)
    assert ("optimizer.lr=0.01" in shown) != terminal
