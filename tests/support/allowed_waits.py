"""The places of a step where the host may wait for the device: each empties the device's queue.

A place is a file, with its folder, and a function.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastrata.rehearsal.figures import WaitFigures

IN_EVERY_STEP = {
    ("core/readback.py", "wait"),  # the step's numbers, at its end
}
IN_SOME: dict[str, set[tuple[str, str]]] = {}
"""By layout, more of them."""


def unexpected_waits(layout: str, waits: Iterable[WaitFigures]) -> list[WaitFigures]:
    """Those in other places."""
    allowed = IN_EVERY_STEP | IN_SOME.get(layout, set())
    return [wait for wait in waits if (wait.line.split(":")[0], wait.function) not in allowed]
