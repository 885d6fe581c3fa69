"""The places of a step where the host may wait for the device: each empties the device's queue.

A place is a file, with its folder, and a function.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastrata.rehearsal.ledger import WaitFigures

IN_EVERY_STEP = {
    ("device/device_transfer.py", "wait"),  # the step's numbers, at its end
}


def unexpected_waits(waits: Iterable[WaitFigures]) -> list[WaitFigures]:
    """Those in other places."""
    return [wait for wait in waits if (wait.line.split(":")[0], wait.function) not in IN_EVERY_STEP]
