"""Speeds of ranks, beside one another: whole numbers, so that a deal by them can be recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from typing_extensions import override

Value = TypeVar("Value")
FULL_SPEED = 256
"""The speed of the fastest rank; the others have their share of it."""

Speeds = tuple[int, ...]
"""By data rank, 1 to `FULL_SPEED`; empty where all are equally fast."""


class SpeedSource(Protocol):
    """Says how fast the ranks are. A value: it can be sent to any process."""

    def __call__(self, step: int) -> Speeds:
        """The speeds that the steps behind step `step` are dealt by; may wait until the run comes
        near them. Asked again, as a lost task is, it says what it said before."""


@dataclass(frozen=True)
class FixedSpeeds(SpeedSource):
    """Speeds that stay."""

    speeds: Speeds

    @override
    def __call__(self, step: int) -> Speeds:
        return self.speeds


EQUAL = FixedSpeeds(())
"""All ranks are equally fast."""


def equal_speeds(nodes: Sequence[str]) -> SpeedSource:
    """Of ranks on any nodes."""
    return EQUAL


def quantized(paces: Sequence[float]) -> Speeds:
    """The speeds of ranks that do so much work in a second.

    Rounding moves a rank's share by 0.2% where it is as fast as the fastest, by 0.8% at a quarter
    of its speed. None is slower than 1.

    Raises:
        ValueError: a pace is not a positive, finite number.
    """
    if not all(math.isfinite(pace) and pace > 0 for pace in paces):
        raise ValueError(f"paces of {list(paces)}: positive, finite numbers are wanted")
    fastest = max(paces, default=1.0)
    return tuple(max(1, round(FULL_SPEED * (pace / fastest))) for pace in paces)


def of_groups(paces: Sequence[float], *, copies: int = 1, repeats: int = 1) -> list[float]:
    """The pace of each data rank, which is that of the slowest of the ranks that compute together.

    Args:
        paces: by rank.
        copies: so many neighbouring ranks have the same rows.
        repeats: the ranks that have all rows between them come so many times over.
    """
    return [min(group) for group in members(paces, copies=copies, repeats=repeats)]


def members(values: Sequence[Value], *, copies: int = 1, repeats: int = 1) -> list[list[Value]]:
    """By data rank, the values of the ranks that compute together.

    Args:
        values: by rank.
        copies: so many neighbouring ranks have the same rows.
        repeats: the ranks that have all rows between them come so many times over.
    """
    num_ranks = len(values) // (copies * repeats)
    groups: list[list[Value]] = [[] for _ in range(num_ranks)]
    for rank, value in enumerate(values):
        groups[rank // copies % num_ranks].append(value)
    return groups


def least_samples(speeds: Speeds, rank: int) -> int:
    """The fewest samples of equal length that a batch must have for this rank to be dealt one."""
    return sum(speed // speeds[rank] for speed in speeds)


@dataclass(frozen=True)
class RankKind:
    """What ranks have in common that have equally much memory."""

    name: str = ""
    most_tokens: int | None = None
    """Of their micro-batches; None: as many as those of any other."""

    def budget(self, tokens: int) -> int:
        """Tokens of their micro-batches where others' hold so many."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)


RankKinds = tuple[RankKind, ...]
"""By data rank; empty where all are of one kind."""


def one_kind(nodes: Sequence[str]) -> RankKinds:
    """Of ranks on any nodes."""
    return ()


def different(kinds: RankKinds) -> tuple[RankKind, ...]:
    """Every kind once, in the order of ranks: its place is its number."""
    return tuple(dict.fromkeys(kinds)) or (RankKind(),)


def kinds_of_groups(kinds: RankKinds, *, copies: int = 1, repeats: int = 1) -> RankKinds:
    """The kind of each data rank: all that compute together have room for its micro-batches.

    Args:
        kinds: by rank.
        copies: so many neighbouring ranks have the same rows.
        repeats: the ranks that have all rows between them come so many times over.
    """
    return tuple(_together(group) for group in members(kinds, copies=copies, repeats=repeats))


def _together(kinds: Sequence[RankKind]) -> RankKind:
    limits = [kind.most_tokens for kind in kinds if kind.most_tokens is not None]
    names = dict.fromkeys(kind.name for kind in kinds)
    return RankKind(" + ".join(names), min(limits, default=None))
