"""The comparison of two runs, step by step: the same samples, and the same losses?"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Step = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two runs differ first. `values`: what each of them has; None where it has none."""

    step: int
    what: Literal["digest", "loss", "missing"]
    values: tuple[str | float | None, str | float | None]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How two runs compare."""

    equal: bool
    """Whether they have the same steps, with the same samples in each."""
    first_difference: Difference | None
    """None also means that no loss differs by more than the tolerance."""
    max_relative_loss_difference: float
    """Over all steps of both in which both losses are finite."""


def compare(first: Sequence[Step], second: Sequence[Step], *, tolerance: float) -> Comparison:
    """Compares the effective steps of two runs.

    Args:
        first: of one run.
        second: of the other.
        tolerance: the largest relative difference of two losses that is none. The same sums in
            another order differ a little.
    """
    one, two = ({step["step"]: step for step in steps} for steps in (first, second))
    numbers = sorted(one.keys() | two.keys())
    found = (_difference(k, one.get(k), two.get(k), tolerance) for k in numbers)
    losses = [(one[k]["loss"], two[k]["loss"]) for k in one.keys() & two.keys()]
    return Comparison(
        equal=one.keys() == two.keys() and all(one[k]["digest"] == two[k]["digest"] for k in one),
        first_difference=next((difference for difference in found if difference), None),
        max_relative_loss_difference=max(
            (relative_difference(*pair) for pair in losses if all(map(math.isfinite, pair))),
            default=0.0,
        ),
    )


def digest_of(steps: Sequence[Step]) -> str:
    """One digest of the samples of all these steps, in order: SHA-256 of a line `STEP DIGEST` for
    each. Runs that have it in common were trained on the same samples, in the same steps."""
    lines = (f"{step['step']} {step['digest']}\n" for step in steps)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def relative_difference(a: float, b: float) -> float:
    """|a - b| over the larger of |a| and |b|; infinite where just one of them is finite, and 0
    where neither is."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _difference(
    number: int, one: Step | None, two: Step | None, tolerance: float
) -> Difference | None:
    if one is None or two is None:
        digests = (one["digest"] if one else None, two["digest"] if two else None)
        return Difference(step=number, what="missing", values=digests)
    if one["digest"] != two["digest"]:
        return Difference(step=number, what="digest", values=(one["digest"], two["digest"]))
    if relative_difference(one["loss"], two["loss"]) > tolerance:
        values = (_or_none(one["loss"]), _or_none(two["loss"]))
        return Difference(step=number, what="loss", values=values)
    return None


def _or_none(value: float) -> float | None:
    """JSON knows no number that is not finite."""
    return value if math.isfinite(value) else None
