"""The audit of a run: checks of its history against its data sets, sample by sample."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from elastrata.run import history
from elastrata.run.consistency import read_evidence
from elastrata.run.folder import (
    RUN_FILE,
    DataSet,
    Parent,
    PhaseSummary,
    read_identity,
    read_summary,
    recipe_problems,
)
from elastrata.run.fork import (
    InheritedSteps,
    Span,
    TakenSamples,
    read_inherited_steps,
    samples_by_step,
)
from elastrata.run.timeline import Attempt, attempts
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.format import MANIFEST, FileEntry, Manifest, open_shard
from elastrata_pipelines.hashing import U64, digest
from elastrata_pipelines.order import Order
from elastrata_pipelines.rows import mixture_ids
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The samples expected at every position of a run."""

    order: Order
    sample_ids: U64
    """The ids of all samples in stored order (stripe after stripe), shape [num_samples]."""

    def digest_of(self, first: int, count: int) -> str:
        """Return the digest of samples first .. first + count - 1, in the format of records."""
        return f"{self.part_of_digest(first, count):016x}"

    def part_of_digest(self, first: int, count: int, source: int | None = None) -> int:
        """Return the digest of the samples at positions first .. first + count - 1.

        Digests of the parts of a step add up to the step's digest.

        Args:
            first: position of the first sample.
            count: number of samples.
            source: number of their source in the step's mixture; None without a mixture.
        """
        ids = self.sample_ids[self._places(first, count)]
        return digest(ids if source is None else mixture_ids(source, ids))

    def partition_problems(self, batches: Sequence[tuple[int, int]]) -> list[str]:
        """Return one line for every epoch in which a sample is missing or occurs twice.

        Args:
            batches: first position and number of samples of every step. The last epoch that they
                reach may be incomplete.
        """
        size = self.order.num_samples
        stop = max((first + count for first, count in batches), default=0)
        spans: dict[int, list[tuple[int, int]]] = {}
        for first, count in _merge_batches(batches):
            for epoch, start, length in _split_by_epoch(first, count, size):
                # A step may end one epoch and begin the next.
                spans.setdefault(epoch, []).append((start, length))
        problems = []
        for epoch in sorted(spans):
            places = np.concatenate([self._places(*span) for span in spans[epoch]])
            counts = np.bincount(places, minlength=size)
            if twice := int((counts > 1).sum()):
                problems.append(f"epoch {epoch}: {pluralize(twice, 'sample')} seen more than once")
            # Only a complete epoch must contain every sample.
            if stop >= (epoch + 1) * size and (never := int((counts == 0).sum())):
                problems.append(f"epoch {epoch}: {pluralize(never, 'sample')} never seen")
        return problems

    def _places(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the indices, in stored order, of the samples at consecutive positions."""
        places = self.order.places(first, count)
        return places.stripes * self.order.stripe_size + places.rows


def expectation(
    data: Storage, manifest: Manifest, *, seed: int, window_stripes: int
) -> Expectation:
    """Return the samples that a run on a data set must see.

    It reads the ids of all samples, eight bytes each.

    Raises:
        UserError: a shard is missing or damaged.
    """
    parts = [_sample_ids(data, manifest, shard) for shard in manifest.shards]
    return Expectation(
        order=Order(
            num_samples=manifest.samples,
            stripe_size=manifest.stripe_size,
            window_stripes=window_stripes,
            seed=seed,
        ),
        sample_ids=np.concatenate(parts),
    )


def _sample_ids(data: Storage, manifest: Manifest, shard: FileEntry) -> U64:
    """Return the ids of a shard's samples."""
    with open_shard(data, manifest, shard) as reader:
        # Only the column of ids is read, not the tokens.
        ids: U64 = reader.read(["sample_id"], use_threads=False)["sample_id"].to_numpy()
    if len(ids) != shard.samples:
        raise UserError(
            f"{data.uri(shard.path)}: {pluralize(len(ids), 'sample')}, expected {shard.samples}"
        )
    return ids


def _merge_batches(batches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge consecutive batches into as few spans of positions as possible."""
    spans: list[tuple[int, int]] = []
    for first, count in batches:
        if spans and sum(spans[-1]) == first:
            spans[-1] = (spans[-1][0], spans[-1][1] + count)
        else:
            spans.append((first, count))
    return spans


def _split_by_epoch(first: int, count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield epoch, first position and length of a span's part in each epoch of `size` positions."""
    stop = first + count
    while first < stop:
        epoch = first // size
        end = min(stop, (epoch + 1) * size)
        yield epoch, first, end - first
        first = end


Step = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two runs; a value is None if its run has none."""

    step: int
    what: Literal["digest", "loss", "missing"]
    values: tuple[str | float | None, str | float | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing two runs."""

    equal: bool
    """Whether both have the same steps, with the same samples in each."""
    first_difference: Difference | None
    """None if the runs are equal and no loss differs by more than the tolerance."""
    max_relative_loss_difference: float
    """Over all common steps in which both losses are finite."""


def compare(first: Sequence[Step], second: Sequence[Step], *, tolerance: float) -> Comparison:
    """Compare the effective steps of two runs.

    Args:
        first: steps of one run.
        second: steps of the other run.
        tolerance: relative tolerance when comparing losses.
    """
    one, two = ({step["step"]: step for step in steps} for steps in (first, second))
    numbers = sorted(one.keys() | two.keys())
    found = (_difference(k, one.get(k), two.get(k), tolerance) for k in numbers)
    losses = [(one[k]["loss"], two[k]["loss"]) for k in one.keys() & two.keys()]
    return Comparison(
        equal=one.keys() == two.keys() and all(one[k]["digest"] == two[k]["digest"] for k in one),
        # Lazily: only the first difference is computed.
        first_difference=next((difference for difference in found if difference), None),
        max_relative_loss_difference=max(
            (relative_difference(*pair) for pair in losses if all(map(math.isfinite, pair))),
            default=0.0,
        ),
    )


def digest_of(steps: Sequence[Step]) -> str:
    """Return one digest of the samples of all steps: SHA-256 of a line `STEP DIGEST` per step.

    Runs with equal digests were trained on the same samples in the same steps.
    """
    lines = (f"{step['step']} {step['digest']}\n" for step in steps)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|).

    The result is infinite if only one of them is finite, and 0 if neither is.
    """
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _difference(
    number: int, one: Step | None, two: Step | None, tolerance: float
) -> Difference | None:
    """Return how a step differs between two runs; None if it does not."""
    if one is None or two is None:
        digests = (one["digest"] if one else None, two["digest"] if two else None)
        return Difference(step=number, what="missing", values=digests)
    if one["digest"] != two["digest"]:
        return Difference(step=number, what="digest", values=(one["digest"], two["digest"]))
    # The same sums in another order differ a little, so losses get a tolerance, digests none.
    if relative_difference(one["loss"], two["loss"]) > tolerance:
        values = (_finite_or_none(one["loss"]), _finite_or_none(two["loss"]))
        return Difference(step=number, what="loss", values=values)
    return None


def _finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite."""
    # JSON has no number that is not finite.
    return value if math.isfinite(value) else None


Entry = Mapping[str, Any]
# Histories can be edited by hand: without a limit, a huge number would overflow in numpy.
_FURTHEST = 2**62
"""Limit of positions, because arithmetic on them is done in 64 bits."""


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """Whether a data set could be used to check the steps."""

    state: Literal["checked", "missing", "changed", "damaged"]
    text: str
    """Why it could not, for display; empty otherwise."""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of auditing one run."""

    run: str
    steps: tuple[Entry, ...]
    """The effective steps, in order."""
    attempts: tuple[Attempt, ...]
    data: DataCheck
    """The first failed check of a data set, or that all were checked."""
    digests_checked: int
    """Number of steps whose digest was compared with their data sets."""
    epochs: tuple[float, ...]
    """For each readable data set, how many times it was read."""
    inherited: InheritedSteps
    """The steps that the run has from its ancestors."""
    parent: Parent | None
    """The initial weights; None: initialised at random."""
    problems: tuple[str, ...]
    """One line for each problem; empty if every sample was seen as intended."""

    @property
    def partition_ok(self) -> bool:
        """Whether every step exists once, with its own samples, each once in every epoch."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
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
    """Check a run's history against itself and against the run's data sets.

    Raises:
        UserError: there is no such run, it has no history yet, or its history was altered and
            cannot be read.
    """
    identity = read_identity(run)
    if identity is None:
        raise UserError(f"{run.uri()}: no run here ({RUN_FILE} is missing)")
    run_evidence = read_evidence(run)
    entries = run_evidence.history.entries
    steps = history.effective_steps(entries)
    if not steps:
        raise UserError(f"{run.uri('history')}: no step is recorded yet")
    # A fork's epochs begin with the samples that its ancestors took.
    before, origin = read_inherited_steps(identity.origin, entries, run.uri()), identity.origin
    begin = (origin.step, origin.samples) if origin else (0, 0)
    problems = [*run_evidence.problems, *recipe_problems(run, identity), *before.problems]
    problems += [*sequence_problems(entries, begin[0]), *position_problems(steps, begin)]
    phases = read_summary(run).phases
    parts_by_step = samples_by_step(steps, phases, identity, run.uri(RUN_FILE))
    expected, states = _read_expectations(parts_by_step)
    # Parts that are impossible or of unusable data sets are reported elsewhere.
    checkable_steps = [
        (step, parts)
        for step, parts in zip(steps, parts_by_step, strict=True)
        if parts and all(_is_possible(part, expected.get(part.data_set)) for part in parts)
    ]
    problems += digest_problems(checkable_steps, expected)
    epochs = list[float]()
    for data_set, samples in expected.items():
        earlier = before.spans.get(data_set.fingerprint, ())
        spans = [
            part.span for _, parts in checkable_steps for part in parts if part.data_set == data_set
        ]
        problems += samples.partition_problems([*earlier, *spans])
        epochs.append(sum(count for _, count in [*earlier, *spans]) / samples.order.num_samples)
    return Audit(
        run=run.uri(),
        steps=tuple(steps),
        attempts=tuple(attempts(entries)),
        data=states[0] if states else DataCheck(state="checked", text=""),
        digests_checked=len(checkable_steps),
        epochs=tuple(epochs),
        parent=identity.parent,
        inherited=before,
        problems=tuple(problems),
    )


def sequence_problems(entries: Sequence[Entry], first: int = 0) -> list[str]:
    """Return one line for steps after `first` that are missing or duplicated."""
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
    # A start that is missing shows that the first part of the attempt is lost or altered.
    orphans = {entry["attempt"] for entry in entries if entry["kind"] == "step"} - started
    return problems + [f"attempt {number}: has steps, but no start" for number in sorted(orphans)]


def position_problems(steps: Sequence[Entry], begin: Span = (0, 0)) -> list[str]:
    """Return one line for every step that does not begin at the end of the previous step.

    Args:
        steps: the effective steps. A step after a missing one is not reported.
        begin: steps and samples before the first step.
    """
    # By step number, so that a step after a missing one is not blamed for it.
    ends = dict([begin]) | {step["step"]: step["samples"] for step in steps}
    problems = []
    for step in steps:
        before = ends.get(step["step"] - 1)
        if step["batch_samples"] < 1:
            problems.append(
                f"step {step['step']}: {pluralize(step['batch_samples'], 'sample')} in it"
            )
        elif before is not None and before + step["batch_samples"] != step["samples"]:
            problems.append(
                f"step {step['step']}: {pluralize(step['samples'], 'sample')} seen after it, but "
                f"{before:,} "
                f"before it and {step['batch_samples']:,} in it"
            )
    return problems


def digest_problems(
    steps: Iterable[tuple[Entry, Sequence[TakenSamples]]], expected: Mapping[DataSet, Expectation]
) -> list[str]:
    """Return one line for every step that saw other samples than expected.

    Args:
        steps: each step with the samples it took of each data set.
        expected: the expected samples of each data set.
    """
    problems = []
    for step, parts in steps:
        sums = (expected[part.data_set].part_of_digest(*part.span, part.source) for part in parts)
        # Digests are sums modulo 2**64, so the parts of a step can be added in any order.
        digest = f"{sum(sums) % 2**64:016x}"
        if digest != step["digest"]:
            problems.append(
                f"step {step['step']}: digest {step['digest']}, but the data set gives {digest}"
            )
    return problems


def _is_possible(part: TakenSamples, expected: Expectation | None) -> bool:
    """Return whether such a part of a step is possible."""
    first, count = part.span
    # Impossible parts have been reported by `position_problems` already.
    if expected is None:
        return False
    return 0 <= first < _FURTHEST and 0 < count <= expected.order.num_samples


class _UnusableError(Exception):
    """A data set cannot be used to check the steps."""

    def __init__(self, check: DataCheck) -> None:
        super().__init__(check.text)
        self.check = check


def _read_expectations(
    parts_by_step: Iterable[Sequence[TakenSamples]],
) -> tuple[dict[DataSet, Expectation], list[DataCheck]]:
    """Return what can be expected of each usable data set, and why others are unusable."""
    phases = {part.data_set: part.phase for parts in parts_by_step for part in parts}
    expected, states = dict[DataSet, Expectation](), list[DataCheck]()
    for data_set, phase in phases.items():
        try:
            expected[data_set] = _read_expectation(data_set, phase)
        except _UnusableError as error:
            states.append(error.check)
    return expected, states


def _read_expectation(data_set: DataSet, phase: PhaseSummary) -> Expectation:
    """Return the samples expected of a data set in a phase.

    Raises:
        _UnusableError: the data set is missing, changed or damaged.
    """
    data = Storage(data_set.url)
    try:
        manifest = Manifest.find(data)
    except UserError as error:
        raise _UnusableError(DataCheck(state="damaged", text=str(error))) from None
    if manifest is None:
        text = f"{data.uri()}: no data set here ({MANIFEST} is missing)"
        raise _UnusableError(DataCheck(state="missing", text=text))
    # A data set at the same place may have been prepared anew.
    if manifest.fingerprint != data_set.fingerprint:
        text = f"{data.uri(MANIFEST)}: no longer the data set that the run was trained on"
        raise _UnusableError(DataCheck(state="changed", text=text))
    try:
        return expectation(data, manifest, seed=phase.seed, window_stripes=phase.window_stripes)
    except UserError as error:
        raise _UnusableError(DataCheck(state="damaged", text=str(error))) from None
