"""The chain of a history: whether each of its parts goes on after the one before it.

It is there to find accidents: copies, losses, edits by hand. Who recomputes all of it is not found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from elastrata.run.parts import Link, Part, PartName

State = Literal["whole", "none", "broken"]
"""`none`: nothing of it was written by a version that seals parts."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The verdict of a history's seals."""

    state: State
    problems: tuple[str, ...]
    """A line each."""
    foreign: Mapping[PartName, str]
    """Parts that do not belong to the history, with the reason."""


def check_chain(parts: Sequence[Part], heads: Iterable[tuple[str, Link]], where: str) -> Chain:
    """Follows the seals from the first part of every writer to its last.

    Args:
        parts: all of a history, in order.
        heads: what others know of parts that must be there, after a word for who they are.
        where: what to call the history's folder.
    """
    known = list(heads)
    by_name = {str(part.name): part for part in parts}
    foreign, altered = _suspects(parts, [link for _, link in known])
    for part in parts:
        if part.seal and part.seal.before and part.name not in foreign:
            known.append((str(part.name), part.seal.before))
    problems = [f"{name}: altered: {why}" for name, why in altered.items()]
    problems += [line for part in parts if part.name not in foreign for line in _broken(part)]
    problems += [line for who, link in known for line in _link_problems(link, by_name, who)]
    lines = [f"{where}/{line}" for line in dict.fromkeys(problems)]
    is_sealed = any(part.seal for part in parts)
    return Chain(
        state="broken" if foreign or lines else "whole" if is_sealed or not parts else "none",
        problems=(*foreign_lines(where, foreign), *lines),
        foreign=foreign,
    )


def foreign_lines(where: str, foreign: Mapping[PartName, str]) -> list[str]:
    """A line for each part that does not belong to the history in that folder."""
    return [f"{where}/{name}: not in the chain: {why}" for name, why in sorted(foreign.items())]


def foreign_parts(parts: Sequence[Part]) -> dict[PartName, str]:
    """The parts that belong to another place or to no chain, with the reason.

    Args:
        parts: all of a history, or the first of every attempt.
    """
    return _suspects(parts, ())[0]


def _suspects(
    parts: Sequence[Part], heads: Iterable[Link]
) -> tuple[dict[PartName, str], dict[PartName, str]]:
    """Parts without a seal of their own: those that are foreign, and those that others know."""
    links = [part.seal.before for part in parts if part.seal and part.seal.before]
    linked = {link.part for link in (*links, *heads)}
    foreign: dict[PartName, str] = {}
    altered: dict[PartName, str] = {}
    for writer in ("", "d"):
        for part, why in _unlike([part for part in parts if part.name.writer == writer]):
            is_known = str(part.name) in linked and part.seal is None
            (altered if is_known else foreign)[part.name] = why
    return foreign, altered


def _unlike(own: Sequence[Part]) -> Iterator[tuple[Part, str]]:
    """Those of one writer that do not look like what comes next in its chain."""
    first = next((part for part in own if _is_in_place(part)), None)
    before = first.seal.before if first and first.seal else None
    oldest = PartName.parse(before.part) if before else None
    for part in own:
        if part.seal and not _is_in_place(part):
            yield part, f"a copy of {part.seal.part}"
        elif part.seal and part.seal.before is None and part is not first:
            yield part, "it begins a history of its own"
        elif part.seal is None and part.has_torn_seal:
            yield part, "its seal is not its last line, or torn"
        elif part.seal is None and first and (oldest is None or part.name > oldest):
            yield part, "it has no seal"
        elif part.seal is None and not part.name.writer and (other := _other_attempt(part)):
            yield part, f"its lines are of attempt {other}"


def _is_in_place(part: Part) -> bool:
    return part.seal is not None and part.seal.part == str(part.name)


def _other_attempt(part: Part) -> int | None:
    """The attempt that a part without a seal says it is of, where its name says another one."""
    try:
        said = json.loads(part.lines[0])["attempt"]
    except (IndexError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return said if isinstance(said, int) and said != part.name.attempt else None


def _broken(part: Part) -> Iterator[str]:
    """A line where a part is not what its own seal says."""
    seal = part.seal
    if seal and (len(part.lines), part.link.sha256) != (seal.lines, seal.sha256):
        yield f"{part.name}: altered: its lines are not those that were sealed"


def _link_problems(link: Link, by_name: Mapping[str, Part], who: str) -> Iterator[str]:
    part = by_name.get(link.part)
    if part is None:
        yield f"{link.part}: missing: {who} goes on after it"
    elif not part.holds(link):
        yield f"{link.part}: altered: not the one that {who} goes on after"
