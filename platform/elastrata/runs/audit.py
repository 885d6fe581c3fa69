"""The audit: what a run's history and its data set prove about what it has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from elastrata.recipe.number import recipe_number
from elastrata.runs import history
from elastrata.runs.attempts import Attempt, attempts
from elastrata.runs.expectation import Expectation, expectation
from elastrata.runs.folder import RUN_FILE, RunIdentity, read_identity
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
    expectation: Expectation | None = None


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What was found about one run."""

    run: str
    steps: tuple[Entry, ...]
    """The steps that made the model what it is, in order."""
    attempts: tuple[Attempt, ...]
    data: DataCheck
    digests_checked: int
    """Steps whose digest was compared with what the data set gives."""
    epochs: float
    """How often the data set was gone through; 0 where it could not be read."""
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
            "attempts": [attempt.to_dict() for attempt in self.attempts],
            "digests_checked": self.digests_checked,
            "data": self.data.state,
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
    entries = history.read(run.sub("history"))
    steps = history.effective_steps(entries)
    if not steps:
        raise UserError(f"{run.uri('history')}: no step is on record yet")
    problems = [*sequence_problems(entries), *position_problems(steps)]
    data = _check_data(run, identity)
    checked: list[Entry] = []
    if data.expectation:
        checked = [step for step in steps if _is_within_reach(step, data.expectation)]
        problems += sample_problems(checked, data.expectation)
    samples = sum(step["batch_samples"] for step in checked)
    return Audit(
        run=run.uri(),
        steps=tuple(steps),
        attempts=tuple(attempts(entries)),
        data=data,
        digests_checked=len(checked),
        epochs=samples / data.expectation.order.num_samples if data.expectation else 0.0,
        problems=tuple(problems),
    )


def sequence_problems(entries: Sequence[Entry]) -> list[str]:
    """One line for steps that are missing or twice in the effective history."""
    surviving = history.surviving_steps(entries)
    numbers = sorted(step["step"] for step in surviving)
    problems = []
    for before, number in pairwise([0, *numbers]):
        if number == before:
            problems.append(f"step {number}: more than once in the history")
        elif number == before + 2:
            problems.append(f"step {number - 1}: missing in the history")
        elif number > before + 2:
            problems.append(f"steps {before + 1} to {number - 1}: missing in the history")
    started = {entry["attempt"] for entry in entries if entry["kind"] == "started"}
    orphans = {entry["attempt"] for entry in entries if entry["kind"] == "step"} - started
    return problems + [f"attempt {number}: has steps, but no start" for number in sorted(orphans)]


def position_problems(steps: Sequence[Entry]) -> list[str]:
    """One line for every step that does not begin at the position where the one before it ended.

    Args:
        steps: the effective steps. Those after a missing one are not blamed for it.
    """
    ends = {0: 0} | {step["step"]: step["samples"] for step in steps}
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


def sample_problems(steps: Sequence[Entry], expected: Expectation) -> list[str]:
    """One line for every step that saw other samples than it must, and for every epoch in which
    a sample was seen twice, or not at all."""
    problems = []
    for step in steps:
        digest = expected.digest_of(*_span(step))
        if digest != step["digest"]:
            problems.append(
                f"step {step['step']}: digest {step['digest']}, but the data set gives {digest}"
            )
    return problems + expected.partition_problems([_span(step) for step in steps])


def _span(step: Entry) -> tuple[int, int]:
    """First position and number of samples of a step."""
    return step["samples"] - step["batch_samples"], step["batch_samples"]


def _is_within_reach(step: Entry, expected: Expectation) -> bool:
    """Whether there can be such a step; one that there cannot has been reported already."""
    first, count = _span(step)
    return 0 <= first < _FURTHEST and 0 < count <= expected.order.num_samples


def _check_data(run: Storage, identity: RunIdentity) -> DataCheck:
    data = Storage(identity.data)
    try:
        manifest = Manifest.read(data)
    except UserError as error:
        return DataCheck(state="missing", text=str(error))
    if manifest.fingerprint != identity.data_fingerprint:
        text = f"{data.uri(MANIFEST)}: not the data set any more that the run was trained on"
        return DataCheck(state="changed", text=text)
    seed, window_stripes = recipe_number(run, "seed"), recipe_number(run, "data.window_stripes")
    try:
        expected = expectation(data, manifest, seed=seed, window_stripes=window_stripes)
    except UserError as error:
        return DataCheck(state="damaged", text=str(error))
    return DataCheck(state="checked", text="", expectation=expected)
