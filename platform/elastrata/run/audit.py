"""The audit: what a run's history and its data set prove about what it has seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from elastrata.run import history
from elastrata.run.attempts import Attempt, attempts
from elastrata.run.comparison import digest_of
from elastrata.run.evidence import evidence
from elastrata.run.expectation import Expectation, expectation
from elastrata.run.folder import RUN_FILE, DataSet, read_identity, recipe_problems
from elastrata.run.inherited import Inherited, Span, Taken, inherited, taken_by
from elastrata.run.parent import Parent
from elastrata.run.summary import PhaseSummary, read_summary
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import MANIFEST, Manifest
from elastrata_pipelines.storage import Storage

Entry = Mapping[str, Any]
_FURTHEST = 2**62
"""No position is beyond: arithmetic on positions is done in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """Whether the data set could be asked what every step must have seen."""

    state: Literal["checked", "missing", "changed", "damaged"]
    text: str
    """Why not, for people; empty where it could."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The findings about one run."""

    run: str
    steps: tuple[Entry, ...]
    """The steps that made the model what it is, in order."""
    attempts: tuple[Attempt, ...]
    data: DataCheck
    """The verdict on all its data sets: that of the first one that could not be asked."""
    digests_checked: int
    """Steps whose digest was compared with what their data set gives."""
    epochs: tuple[float, ...]
    """How often each data set that could be read was gone through."""
    inherited: Inherited
    """The steps that the run has from another one."""
    parent: Parent | None
    """The weights that it began with; None: drawn ones."""
    problems: tuple[str, ...]
    """A line each; none: every sample was seen as it should be."""

    @property
    def partition_ok(self) -> bool:
        """Whether every step is there once, with its own samples: each once in every epoch."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "run": self.run,
            "partition_ok": self.partition_ok,
            "steps": len(self.steps),
            "digest": digest_of(self.steps),
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "digests_checked": self.digests_checked,
            "data": self.data.state,
            "inherited": self.inherited.state,
            "parent": self.parent and self.parent.model_dump(mode="json"),
            "problems": list(self.problems),
        }


def audit(run: Storage) -> Audit:
    """Checks a run's history against itself and against the run's data set.

    Raises:
        UserError: there is no such run, it has no history yet, or its history was altered so that
            it cannot be read.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    found = evidence(run)
    entries = found.history.entries
    steps = history.effective_steps(entries)
    if not steps:
        raise UserError(f"{run.uri('history')}: no step is on record yet")
    before, origin = inherited(identity.origin, entries, run.uri()), identity.origin
    begin = (origin.step, origin.samples) if origin else (0, 0)
    problems = [*found.problems, *recipe_problems(run, identity), *before.problems]
    problems += [*sequence_problems(entries, begin[0]), *position_problems(steps, begin)]
    phases = read_summary(run).phases
    taken = taken_by(steps, phases, identity, run.uri(RUN_FILE))
    expected, states = _expectations(taken)
    known = [
        (step, parts)
        for step, parts in zip(steps, taken, strict=True)
        if parts and all(_is_within_reach(part, expected.get(part.data_set)) for part in parts)
    ]
    problems += digest_problems(known, expected)
    epochs = list[float]()
    for data_set, samples in expected.items():
        earlier = before.spans.get(data_set.fingerprint, ())
        spans = [part.span for _, parts in known for part in parts if part.data_set == data_set]
        problems += samples.partition_problems([*earlier, *spans])
        epochs.append(sum(count for _, count in [*earlier, *spans]) / samples.order.num_samples)
    return Audit(
        run=run.uri(),
        steps=tuple(steps),
        attempts=tuple(attempts(entries)),
        data=states[0] if states else DataCheck(state="checked", text=""),
        digests_checked=len(known),
        epochs=tuple(epochs),
        parent=identity.parent,
        inherited=before,
        problems=tuple(problems),
    )


def sequence_problems(entries: Sequence[Entry], first: int = 0) -> list[str]:
    """One line for steps that are missing or twice in the effective history, which begins after
    step `first`."""
    surviving = history.surviving_steps(entries)
    numbers = sorted(step["step"] for step in surviving)
    problems = []
    for before, number in pairwise([first, *numbers]):
        if number == before:
            problems.append(f"step {number}: more than once in the history")
        elif number == before + 2:
            problems.append(f"step {number - 1}: missing in the history")
        elif number > before + 2:
            problems.append(f"steps {before + 1} to {number - 1}: missing in the history")
    started = {entry["attempt"] for entry in entries if entry["kind"] == "started"}
    orphans = {entry["attempt"] for entry in entries if entry["kind"] == "step"} - started
    return problems + [f"attempt {number}: has steps, but no start" for number in sorted(orphans)]


def position_problems(steps: Sequence[Entry], begin: Span = (0, 0)) -> list[str]:
    """One line for every step that does not begin at the position where the one before it ended.

    Args:
        steps: the effective steps. Those after a missing one are not blamed for it.
        begin: steps and samples before the first.
    """
    ends = dict([begin]) | {step["step"]: step["samples"] for step in steps}
    problems = []
    for step in steps:
        before = ends.get(step["step"] - 1)
        if step["batch_samples"] < 1:
            problems.append(f"step {step['step']}: {step['batch_samples']} samples in it")
        elif before is not None and before + step["batch_samples"] != step["samples"]:
            problems.append(
                f"step {step['step']}: {step['samples']:,} samples seen after it, but {before:,} "
                f"before it and {step['batch_samples']:,} in it"
            )
    return problems


def digest_problems(
    steps: Iterable[tuple[Entry, Sequence[Taken]]], expected: Mapping[DataSet, Expectation]
) -> list[str]:
    """One line for every step that saw other samples than it must.

    Args:
        steps: with what each took of which data sets.
        expected: of each data set.
    """
    problems = []
    for step, parts in steps:
        sums = (expected[part.data_set].part_of_digest(*part.span, part.source) for part in parts)
        digest = f"{sum(sums) % 2**64:016x}"
        if digest != step["digest"]:
            problems.append(
                f"step {step['step']}: digest {step['digest']}, but the data set gives {digest}"
            )
    return problems


def _is_within_reach(part: Taken, expected: Expectation | None) -> bool:
    """Whether there can be such a part of a step; one that there cannot has been reported
    already."""
    first, count = part.span
    if expected is None:
        return False
    return 0 <= first < _FURTHEST and 0 < count <= expected.order.num_samples


class _UnusableError(Exception):
    """A data set cannot be asked what was to be seen of it."""

    def __init__(self, check: DataCheck) -> None:
        super().__init__(check.text)
        self.check = check


def _expectations(
    taken: Iterable[Sequence[Taken]],
) -> tuple[dict[DataSet, Expectation], list[DataCheck]]:
    """What each data set that can be asked has at every position; and why others cannot."""
    phases = {part.data_set: part.phase for parts in taken for part in parts}
    expected, states = dict[DataSet, Expectation](), list[DataCheck]()
    for data_set, phase in phases.items():
        try:
            expected[data_set] = _expectation(data_set, phase)
        except _UnusableError as error:
            states.append(error.check)
    return expected, states


def _expectation(data_set: DataSet, phase: PhaseSummary) -> Expectation:
    data = Storage(data_set.url)
    try:
        manifest = Manifest.find(data)
    except UserError as error:
        raise _UnusableError(DataCheck(state="damaged", text=str(error))) from None
    if manifest is None:
        text = f"{data.uri()}: no data set here ({MANIFEST} is missing)"
        raise _UnusableError(DataCheck(state="missing", text=text))
    if manifest.fingerprint != data_set.fingerprint:
        text = f"{data.uri(MANIFEST)}: not the data set any more that the run was trained on"
        raise _UnusableError(DataCheck(state="changed", text=text))
    try:
        return expectation(data, manifest, seed=phase.seed, window_stripes=phase.window_stripes)
    except UserError as error:
        raise _UnusableError(DataCheck(state="damaged", text=str(error))) from None
