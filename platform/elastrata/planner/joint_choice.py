"""The choices of several kinds of ranks in one step: each kind has micro-batches as large as its
memory allows, and all compute the same things again and sum gradients at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from elastrata.planner.choice import Choice, Choices

JointChoice = tuple[Choice, ...]
"""Of each kind."""


def best_together(kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]) -> JointChoice:
    """The fastest that fit. Where a kind has room for none, all save as much memory as there is to
    be saved together, and each has micro-batches as large as it has room for.

    Args:
        kinds: all that each may choose; some that go together.
        fits: whether the kind of that number has room for a choice.
    """
    if found := fastest_together(kinds, fits):
        return found
    smallest = smallest_together(kinds)
    assert smallest is not None, "no choices that go together"
    return tuple(
        _alike_one(kind, one).best(partial(fits, number))
        for number, (kind, one) in enumerate(zip(kinds, smallest, strict=True))
    )


def fastest_together(
    kinds: Sequence[Choices], fits: Callable[[int, Choice], bool]
) -> JointChoice | None:
    """The choices with which the kind that takes longest takes least; None where a kind has room
    for none that goes with those of the others.

    Args:
        kinds: all that each may choose.
        fits: whether the kind of that number has room for a choice.
    """
    if len(kinds) == 1:
        only = partial(fits, 0)
        return (kinds[0].best(only),) if any(map(only, kinds[0].all)) else None
    found = [
        tuple(kind.best(partial(fits, number)) for number, kind in enumerate(alike))
        for alike in _alike(kinds)
        if all(any(fits(n, choice) for choice in kind.all) for n, kind in enumerate(alike))
    ]
    return min(found, key=partial(_seconds, kinds), default=None)


def smallest_together(kinds: Sequence[Choices]) -> JointChoice | None:
    """The choices that need least memory of the kind that needs most; None where there are none
    that go together."""
    if len(kinds) == 1:
        return (kinds[0].smallest,) if kinds[0].all else None
    found = [tuple(kind.smallest for kind in alike) for alike in _alike(kinds)]
    return min(found, key=partial(_bytes, kinds), default=None)


def _alike(kinds: Sequence[Choices]) -> Iterator[list[Choices]]:
    """By what is computed again and when gradients are summed: what each kind may choose then."""
    for policy, sync in reversed(list(product(kinds[0].policies, kinds[0].syncs))):
        alike = [replace(kind, policies=(policy,), syncs=(sync,)) for kind in kinds]
        if all(kind.all for kind in alike):
            yield alike


def _alike_one(kind: Choices, choice: Choice) -> Choices:
    """All that a kind may choose which computes the same things again as a choice, and sums at the
    same time."""
    way, sync = choice.activation_checkpointing, choice.gradient_sync
    return replace(kind, policies=(way,), syncs=(sync,))


def _seconds(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.seconds(choice) for kind, choice in zip(kinds, chosen, strict=True))


def _bytes(kinds: Sequence[Choices], chosen: JointChoice) -> float:
    return max(kind.bytes(choice) for kind, choice in zip(kinds, chosen, strict=True))
