"""The timeline of a run: its entries in seconds since its first start, whatever its clocks did.

A wall clock may jump, and those of two hosts differ. So a difference of times counts only if there
is nothing better: steps, evaluations and the phases of a start have measured seconds, and two
entries of one host have readings of its monotonic clock. No interval is shorter than what was
measured in it, and none is negative; the whole is the sum of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastrata.run.attempts import Attempt

Entry = Mapping[str, Any]


def seconds_between(before: Entry, after: Entry) -> float:
    """Return the seconds from one entry to a later one; 0 where wall clocks of two hosts, or one
    that was set back, have them the other way round."""
    clock = before.get("clock")
    is_one_clock = clock is not None and clock == after.get("clock")
    key = "monotonic" if is_one_clock and {"monotonic"} <= before.keys() & after.keys() else "time"
    return max(0.0, float(after[key]) - float(before[key]))


def end_index(groups: Sequence[Attempt], ended: Entry) -> int:
    """Return which group of workers a run ended after, by the entry that says so.

    The entry says it (`last`). In histories of old it only has the number of its launch, that of
    the launch's first group, and the wall clock tells how many groups the launch had.
    """
    if "last" in ended:
        return len([group for group in groups if group.attempt <= ended["last"]]) - 1
    first = len([group for group in groups if group.attempt < ended["attempt"]])
    more = len([group for group in groups[first + 1 :] if group.started <= ended["time"]])
    return min(first + more, len(groups) - 1)


class Timeline:
    """The seconds of a history, group by group.

    Args:
        entries: of the history.
        groups: its attempts.
    """

    def __init__(self, entries: Sequence[Entry], groups: Sequence[Attempt]) -> None:
        self.seconds = 0.0
        """From the first group's processes to the last entry, without the time between the end of
        a launch and the next one's workers; at least the measured seconds in it."""
        self.evaluating = 0.0
        self.between_steps = 0.0
        """From one step to the next, without evaluations."""
        self.first_steps = 0.0
        """From the moment when groups were ready until their first steps began, likewise."""
        self.between_groups: list[float] = []
        """By group but the first: from the last step before until its processes were there, without
        evaluations and the time when the run had ended."""
        self.ending = 0.0
        """From the last step to the last entry, likewise."""
        self._idle = 0.0
        self._at: dict[int, tuple[float, float]] = {}
        self._ends = _ends(entries, groups)
        own: dict[int, list[Entry]] = {}
        for entry in entries:
            own.setdefault(entry["attempt"], []).append(entry)
        for index, group in enumerate(groups):
            entries_of_group = own[group.attempt]
            after = groups[index + 1] if index + 1 < len(groups) else None
            self._train(group, entries_of_group)
            self._leave(group, entries_of_group, self._ends.get(index), after)

    def has_ended_after(self, index: int) -> bool:
        """Return whether the run had ended between the group at that index and the next one."""
        return index in self._ends

    def elapsed(self, before: Entry, after: Entry, *, with_pauses: bool = False) -> float:
        """Return the seconds between two entries of groups: starts, steps or evaluations.

        Args:
            before: the earlier one.
            after: the later one.
            with_pauses: whether the time counts when the run had ended.
        """
        first, second = self._at.get(id(before)), self._at.get(id(after))
        if first is None or second is None:  # of a group without a start
            return seconds_between(before, after)
        (begun, idle_before), (done, idle_after) = first, second
        paused = idle_after - idle_before if with_pauses else 0.0
        return max(0.0, done - begun + paused)

    def _train(self, group: Attempt, entries: Sequence[Entry]) -> None:
        """Takes a group from its start to its last step."""
        self.seconds += group.seconds_starting
        before, evaluated, has_step = group.entry, 0.0, False
        self._note(before, 0.0)
        for entry in entries:
            if entry["kind"] == "evaluated":
                evaluated += entry.get("seconds", 0.0)
                self._note(entry, max(evaluated, seconds_between(before, entry)))
            elif entry["kind"] == "step":
                measured = entry["seconds"] + evaluated
                rest = max(0.0, seconds_between(before, entry) - measured)
                self.seconds += measured + rest
                self.evaluating += evaluated
                if has_step:
                    self.between_steps += rest
                else:
                    self.first_steps += rest
                self._note(entry, 0.0)
                before, evaluated, has_step = entry, 0.0, True

    def _leave(
        self, group: Attempt, entries: Sequence[Entry], ended: Entry | None, after: Attempt | None
    ) -> None:
        """Takes what is between a group's last step and the next group, or the last entry."""
        last = group.steps[-1] if group.steps else group.entry
        own = entries[_index(entries, last) + 1 :]
        evaluated = sum(e.get("seconds", 0.0) for e in own if e["kind"] == "evaluated")
        if ended:
            seconds = seconds_between(last, ended)
        elif after:
            seconds = max(0.0, seconds_between(last, after.entry) - after.seconds_starting)
        else:
            # A driver's part comes after its first group's: faults precede the groups they are of.
            later = [*(e for e in entries if e["kind"] == "fault"), *filter(_is_of_group, own)]
            seconds = max((seconds_between(last, entry) for entry in later), default=0.0)
        rest = max(0.0, seconds - evaluated)
        self.seconds += evaluated + rest
        self.evaluating += evaluated
        if after is None:
            self.ending += rest
            return
        self.between_groups.append(rest)
        if ended:
            idle = seconds_between(ended, after.entry) - after.seconds_starting
            self._idle += max(0.0, idle)

    def _note(self, entry: Entry, later: float) -> None:
        self._at[id(entry)] = self.seconds + later, self._idle


def _ends(entries: Sequence[Entry], groups: Sequence[Attempt]) -> dict[int, Entry]:
    """By index of a group that the run ended after, the first end: a run that is launched again
    when all is done ends again, and has done nothing."""
    ends: dict[int, Entry] = {}
    for entry in entries:
        if entry["kind"] == "ended":
            ends.setdefault(end_index(groups, entry), entry)
    return ends


def _index(entries: Sequence[Entry], wanted: Entry) -> int:
    return next(i for i, entry in enumerate(entries) if entry is wanted)


def _is_of_group(entry: Entry) -> bool:
    """Return whether an entry was written while a group lived or when its end was noticed."""
    return entry["kind"] not in ("ended", "returned", "forked", "removed")
