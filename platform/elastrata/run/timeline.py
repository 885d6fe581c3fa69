"""The groups of workers of a run, and its timeline: entries in seconds since the first start.

Wall clocks jump, and those of two hosts differ. A difference of wall-clock times is therefore the
last resort: steps, evaluations and the phases of a start have measured durations, and two entries
of one host have readings of its monotonic clock. No interval is negative or shorter than the
durations measured within it, and the intervals add up to the whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastrata.run.history import Lineage

Entry = Mapping[str, Any]
_FLUSHED_KINDS = ("closed", "halted")
"""Kinds of entries after which a group does no step that is missing in the history."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of workers, from its start to its end."""

    attempt: int
    world_size: int
    state: str
    """The tier of the state it continued from: `new`, `hot` (the memory of other processes) or
    `durable`."""
    step: int
    """Steps done in that state."""
    started: float
    """Unix time at which it became ready for its first step."""
    seconds_starting: float
    """Seconds from the existence of its processes until then; 0 if not in the history."""
    steps: tuple[Entry, ...]
    """Its steps, in the order in which it did them."""
    rolled_back: int
    """Number of its steps that a later attempt undid, as far as history or driver know."""
    at_least: bool
    """Whether it may have done more steps than are known, because it was killed and the record of
    its last seconds is lost. Then `last` and `rolled_back` are lower bounds."""
    entry: Entry
    """Its `started` entry."""

    @property
    def first(self) -> int | None:
        """Its first step; None if it was lost before its first step."""
        return self.steps[0]["step"] if self.steps else None

    @property
    def last(self) -> int | None:
        """Its last step; None if it did none."""
        return self.steps[-1]["step"] if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the steps themselves."""
        return {
            "attempt": self.attempt,
            "world_size": self.world_size,
            "first": self.first,
            "last": self.last,
            "rolled_back": self.rolled_back,
            "at_least": self.at_least,
            "state": self.state,
            "step": self.step,
        }


def attempts(entries: Sequence[Entry]) -> list[Attempt]:
    """Return the attempts of a history in order; only those with a `started` entry."""
    undone_counts = Counter(
        step["attempt"] for steps in undone_steps(entries).values() for step in steps
    )
    undone_counts.update(_count_unrecorded(entries))
    # These groups flushed their history before they ended, so no step of theirs is unknown.
    flushed_attempts = {entry["attempt"] for entry in entries if entry["kind"] in _FLUSHED_KINDS}
    starts = [entry for entry in entries if entry["kind"] == "started"]
    newest = starts[-1]["attempt"] if starts else 0
    steps: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps.setdefault(entry["attempt"], []).append(entry)
    return [
        Attempt(
            attempt=entry["attempt"],
            world_size=entry["world_size"],
            # Earlier versions recorded no tier.
            state=entry.get("state", "durable" if entry["step"] else "new"),
            step=entry["step"],
            started=entry["time"],
            seconds_starting=sum(entry.get("seconds", {}).values()),
            steps=tuple(steps.get(entry["attempt"], ())),
            rolled_back=undone_counts[entry["attempt"]],
            # The newest group may still be running: its unwritten steps are not lost.
            at_least=entry["attempt"] not in flushed_attempts and entry["attempt"] != newest,
            entry=entry,
        )
        for entry in starts
    ]


def _count_unrecorded(entries: Sequence[Entry]) -> Counter[int]:
    """Return, by attempt, the number of undone steps that only the driver knows of."""
    undone = undone_steps(entries)
    starts = [entry["attempt"] for entry in entries if entry["kind"] == "started"]
    found: Counter[int] = Counter()
    for entry in entries:
        if entry["kind"] == "rolled_back":
            count = entry["last"] - entry["first"] + 1 - len(undone.get(entry["attempt"], ()))
            before = (attempt for attempt in starts if attempt < entry["attempt"])
            # The entry names the attempt that went back; the undone steps are of the one before.
            found[max(before, default=0)] += max(0, count)
    return found


def newest_known_step(entries: Sequence[Entry], newest: int) -> int:
    """Return the newest step known to be done since the run last continued from an earlier state.

    Args:
        entries: the run's history.
        newest: the newest effective step in it.
    """
    starts = (entry["attempt"] for entry in entries if entry["kind"] == "started")
    attempt: int = max(starts, default=0)
    later = [entry for entry in entries if entry["attempt"] >= attempt]
    # A driver that died before the next group's first step had last heard of steps undone by then.
    undone = {entry["last"] for entry in later if entry["kind"] == "rolled_back"}
    # A dead driver may have heard of more steps than are in the history: its successor notes the
    # newest one in the `fault` entry.
    reported_steps = [int(e.get("newest", 0)) for e in later if e["kind"] == "fault"]
    return max([newest, *(step for step in reported_steps if step not in undone)])


def undone_steps(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """Return the steps that each attempt rolled back, by the attempt that did so."""
    lineage, steps, seen_steps = Lineage(), list[Entry](), list[Entry]()
    undone: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps.append(entry)
            seen_steps.append(entry)
        elif event := lineage.event(entry):
            left = lineage.left(event, steps, seen_steps)
            # By identity, because steps of two attempts can be equal in number.
            kept = set(map(id, left))
            undone[event.attempt] = [step for step in steps if id(step) not in kept]
            steps = left
    return undone


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The time from the last step of one group of workers to the first step of the next group."""

    attempt: int
    """The attempt that took over."""
    time: float
    """Unix time of the last step before."""
    cause: str
    """Planned causes, before which the state was saved: `resize`, `drain`, `stop`. `fault`: a group
    was lost. `returned`: a user went back to a checkpoint. `restart`: the run had ended and was
    launched again. `unknown`: the history does not say."""
    seconds: float
    """Seconds without a step, not counting the time in which the run had ended."""
    steps_rolled_back: int
    """Steps rolled back, by the larger of two counts: the driver's and that of the history."""
    seconds_rolled_back: float
    """Seconds of the rolled-back steps in the history. The time of other steps is in `seconds`."""
    at_least: bool
    """Whether both are lower bounds, because a group that was killed may have done steps that are
    recorded nowhere."""
    seconds_unrecorded: float | None
    """Upper bound of the seconds in which it may have done such steps before its loss was noticed,
    provided that storage accepted the history. 0 if `at_least` is not set, None if unknown."""
    world_size: int
    state: str
    """The tier of the state it continued from: `new`, `hot` or `durable`."""


def recoveries(entries: Sequence[Entry]) -> list[Recovery]:
    """Return the recoveries of a history, in order."""
    groups = attempts(entries)
    timeline, undone = Timeline(entries, groups), undone_steps(entries)
    # Groups that were lost before their first step are part of the recovery around them.
    working_indices = [index for index, group in enumerate(groups) if group.steps]
    found = []
    for first, second in pairwise(working_indices):
        before, after = groups[first], groups[second]
        # Every attempt in between may have rolled steps back.
        between = range(before.attempt + 1, after.attempt + 1)
        rolled_back = [step for attempt in between for step in undone.get(attempt, ())]
        rollback_entries = [
            e for e in entries if e["kind"] == "rolled_back" and e["attempt"] in between
        ]
        count = sum(entry["last"] - entry["first"] + 1 for entry in rollback_entries)
        has_ended = any(timeline.has_ended_after(index) for index in range(first, second))
        lost = [group.attempt for group in groups[first:second] if group.at_least]
        found.append(
            Recovery(
                attempt=after.attempt,
                time=before.steps[-1]["time"],
                cause=cause(entries, before, after, has_ended=has_ended),
                seconds=timeline.seconds_between(before.steps[-1], after.steps[0]),
                # The driver hears of steps before they are in the history; the history outlives the
                # driver.
                steps_rolled_back=max(len(rolled_back), count),
                seconds_rolled_back=sum(step["seconds"] for step in rolled_back),
                at_least=bool(lost),
                seconds_unrecorded=_seconds_unrecorded(entries, lost),
                world_size=after.world_size,
                state=after.state,
            )
        )
    return found


def _seconds_unrecorded(entries: Sequence[Entry], lost: Sequence[int]) -> float | None:
    """Return how long lost groups may have done unrecorded steps; None if unknown."""
    unheard = {
        entry["attempt"]: float(entry["seconds_unheard"])
        for entry in entries
        if entry["kind"] == "fault" and "seconds_unheard" in entry
    }
    return sum(unheard[attempt] for attempt in lost) if unheard.keys() >= set(lost) else None


def seconds_lost(entries: Sequence[Entry], found: Sequence[Recovery]) -> float:
    """Return the seconds spent in recoveries and in steps that were rolled back, each counted once.

    Args:
        entries: the history.
        found: its recoveries.
    """
    firsts = {id(g.steps[0]) for g in [g for g in attempts(entries) if g.steps][1:]}
    undone = (step for steps in undone_steps(entries).values() for step in steps)
    # The first step of a group ends a recovery, and is in its seconds.
    again = sum(float(step["seconds"]) for step in undone if id(step) not in firsts)
    return sum(recovery.seconds for recovery in found) + again


def cause(entries: Sequence[Entry], before: Attempt, after: Attempt, *, has_ended: bool) -> str:
    """Return why one group took over from another; see `Recovery.cause`.

    Args:
        entries: the history.
        before: the earlier group.
        after: the group that took over.
        has_ended: whether the run had ended between them.
    """

    def entries_of_kind(kind: str) -> Iterator[Entry]:
        """Return the entries of a kind about the groups before `after`."""
        return (
            entry
            for entry in entries
            # Selected by attempt number, not by time: the clocks of two hosts may disagree.
            if entry["kind"] == kind and before.attempt <= entry["attempt"] < after.attempt
        )

    if next(entries_of_kind("returned"), None):
        return "returned"
    if halted := next(entries_of_kind("halted"), None):
        return str(halted["reason"])
    if next(entries_of_kind("fault"), None):
        return "fault"
    return "restart" if has_ended else "unknown"


def seconds_between(before: Entry, after: Entry) -> float:
    """Return the seconds from one entry to a later one.

    The result is 0 if their wall clocks, of two hosts or set back in between, show the opposite
    order.
    """
    clock = before.get("clock")
    is_one_clock = clock is not None and clock == after.get("clock")
    # A monotonic clock is comparable only with itself, and is never set.
    key = "monotonic" if is_one_clock and {"monotonic"} <= before.keys() & after.keys() else "time"
    return max(0.0, float(after[key]) - float(before[key]))


def end_index(groups: Sequence[Attempt], ended: Entry) -> int:
    """Return the index of the group of workers after which a run ended.

    Args:
        groups: the attempts of the history.
        ended: the entry about the end.
    """
    if "last" in ended:
        return len([group for group in groups if group.attempt <= ended["last"]]) - 1
    # Earlier versions recorded only the number of the launch, which is that of its first group; the
    # wall clock shows how many groups it had.
    first = len([group for group in groups if group.attempt < ended["attempt"]])
    more = len([group for group in groups[first + 1 :] if group.started <= ended["time"]])
    return min(first + more, len(groups) - 1)


class Timeline:
    """Durations of a history, group by group.

    Args:
        entries: the history.
        groups: its attempts.
    """

    def __init__(self, entries: Sequence[Entry], groups: Sequence[Attempt]) -> None:
        self.seconds = 0.0
        """From the first group's processes to the last entry, without the time between the end of a
        launch and the workers of the next one; at least the durations measured in it."""
        self.evaluating = 0.0
        self.between_steps = 0.0
        """From one step to the next, without evaluations."""
        self.first_steps = 0.0
        """From the readiness of each group to the start of its first step, without evaluations."""
        self.between_groups: list[float] = []
        """For each group but the first: from the last step before it until its processes existed,
        without evaluations and without the time in which the run had ended."""
        self.ending = 0.0
        """From the last step to the last entry, without evaluations."""
        # Seconds in which the run had ended, up to the current entry.
        self._idle = 0.0
        # Keyed by identity: entries are dicts, which are not hashable.
        self._at: dict[int, tuple[float, float]] = {}
        self._first_ends = _first_ends(entries, groups)
        entries_by_attempt: dict[int, list[Entry]] = {}
        for entry in entries:
            entries_by_attempt.setdefault(entry["attempt"], []).append(entry)
        for index, group in enumerate(groups):
            entries_of_group = entries_by_attempt[group.attempt]
            after = groups[index + 1] if index + 1 < len(groups) else None
            self._add_training(group, entries_of_group)
            self._add_ending(group, entries_of_group, self._first_ends.get(index), after)

    def has_ended_after(self, index: int) -> bool:
        """Return whether the run had ended between the group at `index` and the next one."""
        return index in self._first_ends

    def seconds_between(self, before: Entry, after: Entry, *, with_pauses: bool = False) -> float:
        """Return the seconds between two entries of groups: starts, steps or evaluations.

        Args:
            before: the earlier entry.
            after: the later entry.
            with_pauses: whether to include the time in which the run had ended.
        """
        first, second = self._at.get(id(before)), self._at.get(id(after))
        if first is None or second is None:  # an entry of a group without a `started` entry
            return seconds_between(before, after)
        (begun, idle_before), (done, idle_after) = first, second
        paused = idle_after - idle_before if with_pauses else 0.0
        return max(0.0, done - begun + paused)

    def _add_training(self, group: Attempt, entries: Sequence[Entry]) -> None:
        """Add the time of a group from its start to its last step."""
        self.seconds += group.seconds_starting
        before, evaluated, has_step = group.entry, 0.0, False
        self._place(before, 0.0)
        for entry in entries:
            if entry["kind"] == "evaluated":
                evaluated += entry.get("seconds", 0.0)
                self._place(entry, max(evaluated, seconds_between(before, entry)))
            elif entry["kind"] == "step":
                measured = entry["seconds"] + evaluated
                # Measured durations win over clocks: `rest` is the clock's difference beyond them.
                rest = max(0.0, seconds_between(before, entry) - measured)
                self.seconds += measured + rest
                self.evaluating += evaluated
                if has_step:
                    self.between_steps += rest
                else:
                    self.first_steps += rest
                self._place(entry, 0.0)
                before, evaluated, has_step = entry, 0.0, True

    def _add_ending(
        self, group: Attempt, entries: Sequence[Entry], ended: Entry | None, after: Attempt | None
    ) -> None:
        """Add the time from a group's last step to the next group or to the last entry."""
        last = group.steps[-1] if group.steps else group.entry
        # Evaluations after the last step belong to no step of this group.
        later_entries = entries[_index_of(entries, last) + 1 :]
        evaluated = sum(e.get("seconds", 0.0) for e in later_entries if e["kind"] == "evaluated")
        if ended:
            seconds = seconds_between(last, ended)
        elif after:
            seconds = max(0.0, seconds_between(last, after.entry) - after.seconds_starting)
        else:
            # The driver's entries follow those of its first group: a fault can precede the entries
            # of the group that it is about.
            later = [
                *(e for e in entries if e["kind"] == "fault"),
                *filter(_is_of_group, later_entries),
            ]
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

    def _place(self, entry: Entry, later: float) -> None:
        """Place an entry on the timeline, `later` seconds after the current end."""
        self._at[id(entry)] = self.seconds + later, self._idle


def _first_ends(entries: Sequence[Entry], groups: Sequence[Attempt]) -> dict[int, Entry]:
    """Return the first end after each group that the run ended after, by the group's index."""
    ends: dict[int, Entry] = {}
    for entry in entries:
        if entry["kind"] == "ended":
            # A finished run that is launched again ends again without a step: the first end counts.
            ends.setdefault(end_index(groups, entry), entry)
    return ends


def _index_of(entries: Sequence[Entry], wanted: Entry) -> int:
    """Return the index of an entry, by identity."""
    return next(i for i, entry in enumerate(entries) if entry is wanted)


def _is_of_group(entry: Entry) -> bool:
    """Return whether an entry was written during a group's life or when its end was noticed."""
    # A command writes these kinds later, when no worker is alive.
    return entry["kind"] not in ("ended", "returned", "forked", "removed")
