"""Relative speeds and memory kinds of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from typing_extensions import override

Value = TypeVar("Value")
# Whole numbers, so that the speeds of a deal can be recorded and repeated exactly.
FULL_SPEED = 256
"""Speed of the fastest rank; other speeds are relative to it."""

Speeds = tuple[int, ...]
"""Speed of each data rank, from 1 to `FULL_SPEED`; empty if all are equally fast."""


class SpeedSource(Protocol):
    """Provides the speeds of the ranks. The value can be sent to any process."""

    def __call__(self, step: int) -> Speeds:
        """Return the speeds by which the steps after step `step` are dealt.

        The call may wait until the run is close to that step. Repeated calls return the same
        speeds, because Ray repeats lost tasks.
        """


@dataclass(frozen=True)
class FixedSpeeds(SpeedSource):
    """Speeds that do not change."""

    speeds: Speeds

    @override
    def __call__(self, step: int) -> Speeds:
        return self.speeds


EQUAL = FixedSpeeds(())
"""Source for ranks that are equally fast."""


def equal_speeds(nodes: Sequence[str]) -> SpeedSource:
    """Return equal speeds for ranks on any nodes."""
    return EQUAL


def quantize_speeds(paces: Sequence[float]) -> Speeds:
    """Return the speeds of ranks that do this much work per second.

    Every speed is at least 1.

    Raises:
        ValueError: a pace is not a positive, finite number.
    """
    if not all(math.isfinite(pace) and pace > 0 for pace in paces):
        raise ValueError(f"paces of {list(paces)}: positive, finite numbers are wanted")
    fastest = max(paces, default=1.0)
    # Rounding changes a rank's share by 0.2% at full speed, and by 0.8% at a quarter of it.
    return tuple(max(1, round(FULL_SPEED * (pace / fastest))) for pace in paces)


def paces_of_data_ranks(
    paces: Sequence[float], *, copies: int = 1, repeats: int = 1
) -> list[float]:
    """Return the pace of each data rank: the pace of the slowest rank that computes for it.

    Args:
        paces: pace of each rank.
        copies: number of neighbouring ranks that have the same rows.
        repeats: number of times that the ranks which have all rows between them are repeated.
    """
    # They wait for each other in every step.
    return [min(group) for group in group_by_data_rank(paces, copies=copies, repeats=repeats)]


def group_by_data_rank(
    values: Sequence[Value], *, copies: int = 1, repeats: int = 1
) -> list[list[Value]]:
    """Return, for each data rank, the values of the ranks that compute for it.

    Args:
        values: value of each rank.
        copies: number of neighbouring ranks that have the same rows.
        repeats: number of times that the ranks which have all rows between them are repeated.
    """
    num_ranks = len(values) // (copies * repeats)
    groups: list[list[Value]] = [[] for _ in range(num_ranks)]
    for rank, value in enumerate(values):
        groups[rank // copies % num_ranks].append(value)
    return groups


def least_samples(speeds: Speeds, rank: int) -> int:
    """Return the smallest number of samples of equal length with which this rank is dealt one."""
    return sum(speed // speeds[rank] for speed in speeds)


@dataclass(frozen=True)
class RankKind:
    """The properties that ranks with the same amount of memory have in common."""

    name: str = ""
    most_tokens: int | None = None
    """Maximum number of tokens in a micro-batch; None for no limit of this kind."""

    def budget(self, tokens: int) -> int:
        """Return the tokens of this kind's micro-batches if unlimited ranks have `tokens`."""
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)


RankKinds = tuple[RankKind, ...]
"""Kind of each data rank; empty if all are alike."""


def equal_kinds(nodes: Sequence[str]) -> RankKinds:
    """Return no kinds: ranks on any nodes are alike."""
    return ()


def distinct_kinds(kinds: RankKinds) -> tuple[RankKind, ...]:
    """Return every distinct kind in rank order; the index of a kind is its number."""
    return tuple(dict.fromkeys(kinds)) or (RankKind(),)


def kinds_of_groups(kinds: RankKinds, *, copies: int = 1, repeats: int = 1) -> RankKinds:
    """Return the kind of each data rank, for which all of its ranks have enough memory.

    Args:
        kinds: kind of each rank.
        copies: number of neighbouring ranks that have the same rows.
        repeats: number of times that the ranks which have all rows between them are repeated.
    """
    return tuple(
        _combine_kinds(group) for group in group_by_data_rank(kinds, copies=copies, repeats=repeats)
    )


def _combine_kinds(kinds: Sequence[RankKind]) -> RankKind:
    limits = [kind.most_tokens for kind in kinds if kind.most_tokens is not None]
    names = dict.fromkeys(kind.name for kind in kinds)
    # The rank with the least memory limits the group.
    return RankKind(" + ".join(names), min(limits, default=None))
