"""What groups of workers have settled on, by their layout and their kinds: a commit keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastrata.planner.choice import Choice, Choices, JointChoice

_CHOSEN = "chosen"
"""The key of `Commit.extra`."""
_USUAL = {"gradient_sync": "step"}
"""Commits leave that out."""


class KnownChoices:
    """Choices that were measured, and the bytes that each needs."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}

    def state(self) -> dict[str, Any]:
        """As a commit keeps it."""
        return {_CHOSEN: self._values} if self._values else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes over what a commit's `extra` says."""
        known = state.get(_CHOSEN)
        self._values = {
            key: found
            for key, found in (known.items() if isinstance(known, dict) else ())
            if isinstance(found, dict) and isinstance(found.get("bytes"), int)
        }

    def add(self, key: str, choice: Choice, needed: float) -> None:
        """A group has settled on a choice.

        Args:
            key: of a kind of a group.
            choice: its own.
            needed: bytes.
        """
        values = {name: v for name, v in asdict(choice).items() if v != _USUAL.get(name)}
        self._values[key] = {**values, "bytes": round(needed)}

    def find(
        self, keys: Sequence[str], choices: Sequence[Choices], memory: Sequence[float]
    ) -> JointChoice | None:
        """The choices that a group like this one has settled on, where they fit its workers, too.

        Args:
            keys: of each kind.
            choices: of each kind.
            memory: bytes that each kind has.
        """
        found = []
        for key, own, room in zip(keys, choices, memory, strict=True):
            values = dict(self._values.get(key, {}))
            if values.pop("bytes", room + 1) > room:
                return None
            found += [one for one in own.all if asdict(one) == {**_USUAL, **values}]
        are_alike = len({(one.activation_checkpointing, one.gradient_sync) for one in found}) == 1
        return tuple(found) if len(found) == len(keys) and are_alike else None
