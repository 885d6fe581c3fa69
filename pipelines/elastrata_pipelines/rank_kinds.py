"""Kinds of ranks, by their memory: those of one kind cut their rows by one budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrata_pipelines.speeds import members


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
