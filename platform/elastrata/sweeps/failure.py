"""The failure of a trial, in a word and a line: it is a result like any other."""

from __future__ import annotations

from elastrata.core.ends import TrainingError
from elastrata.sweeps.report import State

_NOT_FINITE = "not finite"


def failure(error: Exception) -> tuple[State, str]:
    """What became of a trial that raised this, and why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    if isinstance(error, TrainingError) and _NOT_FINITE in text:
        return "diverged", text
    return "failed", f"{type(error).__name__}: {text}"
