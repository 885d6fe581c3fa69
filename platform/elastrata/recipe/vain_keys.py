"""Keys that a recipe says in vain: beside `phases`, a key is what each phase takes that has none of
its own; where each has its own, nobody takes it, and it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastrata.recipe.phase import LENGTHS, PER_PHASE, PhaseKeys, with_inherited
from elastrata.recipe.problems import shown_value
from elastrata.recipe.yaml_reader import RecipeText

Path = tuple[str, ...]


def vain_keys(text: RecipeText) -> list[str]:
    """Return a line for each key that no phase takes, though it was said after the phases had said
    theirs, or with them: in the same file, or on the command line. What a base says is no mistake
    of the recipe that extends it.

    Args:
        text: of a recipe.
    """
    phases = text.values.get("phases")
    if not isinstance(phases, list) or not phases:
        return []
    if not all(isinstance(phase, Mapping) for phase in phases):
        return []  # a mistake, of which its own line tells
    whole = with_inherited(text.values)["phases"]
    keys = [key for key in PhaseKeys.model_fields if key in text.values]
    found = [
        (path, value)
        for key in keys
        for path, value in _leaves(text.values[key], (key,))
        if not (value is None and key in PER_PHASE)
        and not any(_is_same(phase, path, value) for phase in whole)
        and _is_after(text, path, len(phases))
    ]
    return [_line(text, path, value, len(phases)) for path, value in found]


def _line(text: RecipeText, path: Path, value: Any, count: int) -> str:
    key = ".".join(path)
    instead = f"phases.0.{key}" if count == 1 else f"phases.0.{key} to phases.{count - 1}.{key}"
    return (
        f"{text.origin(path)}: {key}: {shown_value(value)}: no phase takes it, as each has its "
        f"own: expected {instead} in its place"
    )


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, below in value.items():
        yield from _leaves(below, (*path, str(key)))


def _is_same(phase: Any, path: Path, value: Any) -> bool:
    """Whether a phase has that very value there."""
    for key in path:
        if not isinstance(phase, Mapping) or key not in phase:
            return False
        phase = phase[key]
    return bool(type(phase) is type(value) and phase == value)


def _is_after(text: RecipeText, path: Path, count: int) -> bool:
    """Whether a key was said with what each phase has in its place, or later."""
    level = text.level(text.origin(path))
    roots = LENGTHS if path[0] in LENGTHS else path[:1]
    for number in range(count):
        own = [text.origin(("phases", str(number), *path))]
        for root in roots:
            place = f"phases.{number}.{root}"
            own += [
                origin
                for said, origin in text.origins.items()
                if said == place or said.startswith(f"{place}.")
            ]
        if any(text.level(origin) > level for origin in own):
            return False
    return True
