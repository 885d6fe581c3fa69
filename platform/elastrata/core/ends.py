"""How a run ends before its last step."""

from __future__ import annotations


class TrainingError(Exception):
    """Training ended before its last step; says how, in one line. Trying again cannot help."""


class ControllerLostError(TrainingError):
    """The workers' controller is gone, and they with it. Another controller may go on."""


class Stopped(Exception):  # noqa: N818  it is the end that was asked for, not an error
    """The workers have saved their state and stopped, as they were asked to."""
