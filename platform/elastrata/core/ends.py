"""How a run ends before its last step."""

from __future__ import annotations

from elastrata.core.events import RanOut


class TrainingError(Exception):
    """Training ended before its last step; says how, in one line. Trying again cannot help."""


class ControllerLostError(TrainingError):
    """The workers' controller is gone, and they with it. Another controller may go on."""


class RanOutError(Exception):
    """A step ran out of a device's memory, and the next group of workers has a choice that needs
    less. `told` says which choice it was."""

    def __init__(self, told: RanOut) -> None:
        super().__init__(told)
        self.told = told

    def __str__(self) -> str:
        return self.told.text


class Stopped(Exception):  # noqa: N818  it is the end that was asked for, not an error
    """The workers have saved their state and stopped, as they were asked to."""
