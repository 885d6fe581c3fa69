"""The groups of workers of a run, and its timeline: its entries in seconds since its first start.

A wall clock may jump, and those of two hosts differ. So a difference of times counts only if there
is nothing better: steps, evaluations and the phases of a start have measured seconds, and two
entries of one host have readings of its monotonic clock. No interval is shorter than what was
measured in it, and none is negative; the whole is the sum of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from elastrata.run.history import Lineage

Entry = Mapping[str, Any]
_LAST_WORDS = ("closed", "halted")
"""Kinds of entries after which a group does no step that is not in the history."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One group of workers, from its start to its end."""

    attempt: int
    world_size: int
    state: str
    """The tier of the state that it continued from: `new`, `hot` (the memory of other processes) or
    `durable`."""
    step: int
    """Steps done in that state."""
    started: float
    """Unix time at which it was ready for its first step."""
    seconds_starting: float
    """Seconds that this took since its processes were there; 0 where the history does not say."""
    steps: tuple[Entry, ...]
    """Its steps, in the order it did them."""
    rolled_back: int
    """How many of its steps a later attempt undid, as far as history or driver know of them."""
    at_least: bool
    """Whether it may have done more steps than are known, as a group that was killed: the record of
    its last seconds died with it. Then `last` and `rolled_back` are lower bounds."""
    entry: Entry
    """The entry of its start."""

    @property
    def first(self) -> int | None:
        """Its first step; None where it was lost before it had done any."""
        return self.steps[0]["step"] if self.steps else None

    @property
    def last(self) -> int | None:
        """Its last step."""
        return self.steps[-1]["step"] if self.steps else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the steps themselves."""
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
    """The attempts of a history, in order; one without a `started` entry is none."""
    undone = Counter(step["attempt"] for steps in undone_steps(entries).values() for step in steps)
    undone.update(_unrecorded(entries))
    whole = {entry["attempt"] for entry in entries if entry["kind"] in _LAST_WORDS}
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
            state=entry.get("state", "durable" if entry["step"] else "new"),
            step=entry["step"],
            started=entry["time"],
            seconds_starting=sum(entry.get("seconds", {}).values()),
            steps=tuple(steps.get(entry["attempt"], ())),
            rolled_back=undone[entry["attempt"]],
            at_least=entry["attempt"] not in whole and entry["attempt"] != newest,
            entry=entry,
        )
        for entry in starts
    ]


def _unrecorded(entries: Sequence[Entry]) -> Counter[int]:
    """By attempt, the steps that the driver knows to be undone and that no history has."""
    undone = undone_steps(entries)
    starts = [entry["attempt"] for entry in entries if entry["kind"] == "started"]
    found: Counter[int] = Counter()
    for entry in entries:
        if entry["kind"] == "rolled_back":
            count = entry["last"] - entry["first"] + 1 - len(undone.get(entry["attempt"], ()))
            before = (attempt for attempt in starts if attempt < entry["attempt"])
            found[max(before, default=0)] += max(0, count)
    return found


def newest_known_step(entries: Sequence[Entry], newest: int) -> int:
    """The newest step that a run is known to have done since it went on from an earlier state.

    Args:
        entries: its history.
        newest: the newest step that counts in it. A dead driver may have heard of more: its
            successor has noted that in the `fault` of the death.
    """
    starts = (entry["attempt"] for entry in entries if entry["kind"] == "started")
    attempt: int = max(starts, default=0)
    later = [entry for entry in entries if entry["attempt"] >= attempt]
    # A driver that died before the next group's first step had last heard of steps undone by then.
    undone = {entry["last"] for entry in later if entry["kind"] == "rolled_back"}
    heard = [int(e.get("newest", 0)) for e in later if e["kind"] == "fault"]
    return max([newest, *(step for step in heard if step not in undone)])


def undone_steps(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    """The steps that counted until an attempt started from before them, by that attempt."""
    lineage, steps, seen = Lineage(), list[Entry](), list[Entry]()
    undone: dict[int, list[Entry]] = {}
    for entry in entries:
        if entry["kind"] == "step":
            steps.append(entry)
            seen.append(entry)
        elif event := lineage.event(entry):
            left = lineage.left(event, steps, seen)
            kept = set(map(id, left))
            undone[event.attempt] = [step for step in steps if id(step) not in kept]
            steps = left
    return undone


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """From the last step of one group of workers to the first step of the next that did any."""

    attempt: int
    """The attempt that took over."""
    time: float
    """Unix time of the last step before."""
    cause: str
    """`resize`, `drain` or `stop`: planned, the state was saved first. `fault`: a group was lost.
    `returned`: a user went back to a checkpoint.
    `restart`: the run had ended and was launched again. `unknown`: the history does not say."""
    seconds: float
    """Without a step; the time between two launches, when the run had ended, is not counted."""
    steps_rolled_back: int
    """As far as they are known: to the driver, which hears of steps before they are in the history,
    or to the history."""
    seconds_rolled_back: float
    """Seconds of those of them that are in the history; that of the others is in `seconds`."""
    at_least: bool
    """Whether both are lower bounds: a group that was killed may have done steps that are on no
    record."""
    seconds_unrecorded: float | None
    """For how long, at most, it may have done such steps before its loss was noticed (a storage
    that takes the history is taken for granted); 0 where
    `at_least` is not set, None where the history does not say."""
    world_size: int
    state: str
    """The tier of the state that it continued from: `new`, `hot` or `durable`."""


def recoveries(entries: Sequence[Entry]) -> list[Recovery]:
    """The recoveries of a history, in order."""
    groups = attempts(entries)
    timeline, undone = Timeline(entries, groups), undone_steps(entries)
    at_work = [index for index, group in enumerate(groups) if group.steps]
    found = []
    for first, second in pairwise(at_work):
        before, after = groups[first], groups[second]
        between = range(before.attempt + 1, after.attempt + 1)
        rolled_back = [step for attempt in between for step in undone.get(attempt, ())]
        said = [e for e in entries if e["kind"] == "rolled_back" and e["attempt"] in between]
        count = sum(entry["last"] - entry["first"] + 1 for entry in said)
        has_ended = any(timeline.has_ended_after(index) for index in range(first, second))
        lost = [group.attempt for group in groups[first:second] if group.at_least]
        found.append(
            Recovery(
                attempt=after.attempt,
                time=before.steps[-1]["time"],
                cause=cause(entries, before, after, has_ended=has_ended),
                seconds=timeline.elapsed(before.steps[-1], after.steps[0]),
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
    """For how long lost groups may have done steps on no record; None: not known of all."""
    unheard = {
        entry["attempt"]: float(entry["seconds_unheard"])
        for entry in entries
        if entry["kind"] == "fault" and "seconds_unheard" in entry
    }
    return sum(unheard[attempt] for attempt in lost) if unheard.keys() >= set(lost) else None


def seconds_lost(entries: Sequence[Entry], found: Sequence[Recovery]) -> float:
    """Seconds without a step that counts because groups took over from others; each once.

    Args:
        entries: of the history.
        found: its recoveries.
    """
    firsts = {id(g.steps[0]) for g in [g for g in attempts(entries) if g.steps][1:]}
    undone = (step for steps in undone_steps(entries).values() for step in steps)
    # The first step of a group ends a recovery, and is in its seconds.
    again = sum(float(step["seconds"]) for step in undone if id(step) not in firsts)
    return sum(recovery.seconds for recovery in found) + again


def cause(entries: Sequence[Entry], before: Attempt, after: Attempt, *, has_ended: bool) -> str:
    """Why one group took over from another, as `Recovery.cause` has it.

    Args:
        entries: of the history.
        before: the group that is gone.
        after: the one that took over.
        has_ended: whether the run had ended between them.
    """

    def happened(kind: str) -> Iterator[Entry]:
        """Entries about the groups that are gone: by their number, for clocks may disagree."""
        return (
            entry
            for entry in entries
            if entry["kind"] == kind and before.attempt <= entry["attempt"] < after.attempt
        )

    if next(happened("returned"), None):
        return "returned"
    if halted := next(happened("halted"), None):
        return str(halted["reason"])
    if next(happened("fault"), None):
        return "fault"
    return "restart" if has_ended else "unknown"


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
