"""The correction of a plan by what steps measure: up from what is smallest, and never too far."""

from __future__ import annotations

from elastrata.planner.choice import Choice, Choices

MEASURED_STEPS = 4
"""Of a phase: after so many the choice stays."""
USABLE = 0.9
"""Of a worker's memory; the rest is for what no step has shown yet."""
_MARGIN = 1.1
"""On how much more a larger choice needs than one that was measured."""
_TELLING = 1.05
"""Of what a step was to need: another one that is to need as much shows how the plan errs."""
_FIRST_SHARE = 0.5
"""Of the room that is left after the first step, what the second one may take: by how much the
plan errs about growth is not known before."""


class Correction:
    """What was measured of a group of workers, and what follows for the next step.

    The first step is taken with what needs least memory. From there on what is measured counts, and
    the plan tells differences only: how much more than a measured step another choice needs. Where
    steps have shown that it tells too little, its differences are taken for as much larger.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._has_grown = False
        self._needed: float | None = None
        """Bytes that the plan has for the step that the room was measured in."""
        self._room = 0.0
        """Bytes that were left then, of those that may be used."""
        self._factor = 1.0

    def begin_phase(self) -> None:
        """The choices are others from now on; what was measured stays."""
        self._steps = 0

    @property
    def has_begun(self) -> bool:
        """Whether anything was measured."""
        return self._needed is not None

    @property
    def is_over(self) -> bool:
        """Whether enough steps were measured."""
        return self._steps >= MEASURED_STEPS

    def measured(self, choices: Choices, choice: Choice, tokens: int, room: float) -> None:
        """A step was taken.

        Args:
            choices: it was one of.
            choice: that it was taken with.
            tokens: of its largest micro-batch, on any rank.
            room: bytes that were left at the peak since the group began, on the rank that had
                least, of those that may be used; negative where there were more in use.
        """
        self._steps += 1
        needed = choices.bytes(choice, tokens)
        if self._needed is None:
            self._needed, self._room = needed, room
        elif needed >= _TELLING * self._needed:
            self._has_grown = True
            self._factor = max(1.0, (self._room - room) / (needed - self._needed))
            self._needed, self._room = needed, room
        elif needed > self._needed or room < self._room:
            self._needed, self._room = needed, room

    def more(self, choices: Choices, choice: Choice) -> float:
        """Bytes that a choice needs beyond what was measured; negative where it needs less."""
        assert self._needed is not None
        growth = choices.bytes(choice) - self._needed
        factor = _MARGIN * self._factor
        return growth * factor if growth > 0 else growth / factor

    def next(self, choices: Choices) -> Choice:
        """What to take the next step with."""
        if self._needed is None:
            return choices.smallest
        is_first = self._steps == 1 and not self._has_grown and self._room > 0
        room = self._room * (_FIRST_SHARE if is_first else 1.0)
        return choices.best(lambda choice: self.more(choices, choice) <= room)
