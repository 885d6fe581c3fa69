"""Error messages about the mistakes in a recipe, one line for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import yaml
from pydantic import ValidationError

from elastrata.recipe.value_types import (
    Model,
    accepts_type,
    best_member,
    choices,
    describe_type,
    field_type,
    item_type,
    iter_key_paths,
    members,
    model_of,
)
from elastrata.recipe.yaml_reader import RecipeText
from elastrata_pipelines.configured_text import MOST_CHARACTERS
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.url_secrets import hide_unrecorded_parts

_SHOWN_CHARACTERS = 60
_SHOWN_PROBLEMS = 50
_UPPER_BOUND_ERRORS = {"less_than", "less_than_equal", "too_long", "string_too_long"}
"""Types of pydantic errors about values beyond an upper bound."""


@dataclass(frozen=True)
class Place:
    """A location in a recipe: its path, the expected type and the actual value."""

    path: tuple[str, ...]
    annotation: Any
    value: Any
    is_known: bool = True


def recipe_problems(error: ValidationError, model: Model, text: RecipeText) -> list[str]:
    """Return one line for each problem that pydantic found, without duplicates.

    Args:
        error: exception that validation raised.
        model: validated section, with the class of the workload in it.
        text: validated values and their origins.
    """
    own_lines: list[str] = []
    inherited_lines: list[str] = []
    flat, values = list(_flatten_errors(error, ())), _fill_in_phases(text.values)
    for problem in flat[:_SHOWN_PROBLEMS]:
        place = _locate(model, problem["loc"], values)
        if place is not None and problem["type"] == "union_tag_invalid":
            # pydantic locates an invalid tag at its section.
            place = _find_tag(place, problem["ctx"]["discriminator"].strip("'"))
        if place is not None and not _follows_from_others(problem, place):
            origin = text.origin(place.path)
            lines = [f"{origin}: {line}" for line in _describe(problem, place, model)]
            (inherited_lines if _is_inherited(place.path, text.values) else own_lines).extend(lines)
    if more := flat[_SHOWN_PROBLEMS:]:
        own_lines.append(f"{text.file}: and {len(more)} more mistakes")
    # A phase repeats the recipe's mistake if it inherits the value, so those lines count only if
    # there are no others.
    return _select_longest(list(dict.fromkeys(own_lines or inherited_lines)))


def _fill_in_phases(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values as pydantic validated them, with everything that phases inherit."""
    if "phases" not in values:
        return values
    # This imports torch, which readers of other files should not have to wait for.
    from elastrata.recipe.recipe import inherit_phase_keys

    return inherit_phase_keys(values)


def _select_longest(lines: list[str]) -> list[str]:
    """Return the lines with only the longest one for each value."""
    # Each member of a union refuses the same value with a separate message, and the longest says
    # most.
    by_value: dict[str, str] = {}
    for line in lines:
        value, expected_is, _ = line.partition(": expected ")
        key = value if expected_is else line
        by_value[key] = max(by_value.get(key, ""), line, key=len)
    return list(by_value.values())


def find_boolean_problems(model: Model, text: RecipeText) -> list[str]:
    """Return a line for each `true` or `false` in place of a number."""
    return [
        f"{text.origin(place.path)}: {'.'.join(place.path)}: {format_value(place.value)}: "
        f"expected {describe_type(place.annotation)}"
        for place in _iter_leaves(Place((), model, text.values))
        # pydantic would silently accept true and false as 1 and 0.
        if isinstance(place.value, bool)
        and place.is_known
        and not accepts_type(place.annotation, bool)
    ]


def format_value(value: Any) -> str:
    """Return a value as one line of YAML, shortened and without secrets."""
    if isinstance(value, str):
        shown = repr(hide_unrecorded_parts(value)[:MOST_CHARACTERS])
    else:
        # Dumping a large value takes long, and only its start is shown.
        part = _truncate(value, [_SHOWN_CHARACTERS])
        dumped = yaml.safe_dump(part, default_flow_style=True, width=10**9, sort_keys=False)
        # YAML ends plain scalars with a document end marker.
        shown = dumped.removesuffix("\n...\n").strip()
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."


def _truncate(value: Any, room: list[int]) -> Any:
    """Return a value reduced to at most `room[0]` texts, numbers, lists and sections."""
    # A list, because nested calls share the count.
    room[0] -= 1
    if isinstance(value, str):
        # Secrets are removed first: truncation could cut off the @ by which they are found.
        return hide_unrecorded_parts(value)[:MOST_CHARACTERS]
    if isinstance(value, Mapping):
        return {_truncate(k, room): _truncate(v, room) for k, v in value.items() if room[0] > 0}
    if isinstance(value, list | tuple):
        return [_truncate(item, room) for item in value if room[0] > 0]
    return value


def _flatten_errors(error: ValidationError, prefix: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Yield all errors, including those of nested sections that validate themselves, with full
    paths."""
    for problem in error.errors(include_url=False):
        inner = problem.get("ctx", {}).get("error")
        loc = prefix + tuple(problem["loc"])
        if isinstance(inner, ValidationError):
            yield from _flatten_errors(inner, loc)
        else:
            yield {**problem, "loc": loc}


def _follows_from_others(problem: Mapping[str, Any], place: Place) -> bool:
    """Return whether a list is too short only because some of its items are invalid."""
    if problem["type"] != "too_short" or not isinstance(place.value, Sized):
        return False
    # pydantic does not count invalid items, which are reported on separate lines.
    return len(place.value) >= int(problem["ctx"]["min_length"])


def _is_inherited(path: Sequence[str], values: Any) -> bool:
    """Return whether a phase inherits this value from the recipe, which reports its problem."""
    if path[:1] != ("phases",):
        return False
    for part in path:
        if isinstance(values, Mapping) and part not in values:
            return True
        values = _item(values, int(part) if isinstance(values, list | tuple) else part)
    return False


def _locate(model: Model, loc: Sequence[Any], values: Any) -> Place | None:
    """Return the place that a location of pydantic denotes.

    The location also contains labels of union members. The result is None if it leads into a member
    that the value does not match.
    """
    at = Place((), model, values)
    parts = list(loc)
    while parts:
        union = members(at.annotation)
        if len(union) > 1:
            chosen = best_member(at.annotation, at.value)
            if chosen is None:
                return at
            # pydantic reports the errors of every member, including those that the user did not
            # mean.
            if not _is_label(parts.pop(0), chosen):
                return None
            at = Place(at.path, chosen, at.value)
            continue
        at = _descend(at, parts.pop(0))
        if not at.is_known:
            return at
    return at


def _find_tag(section: Place, key: str) -> Place:
    """Return the place of the key that selects one section of a union."""
    models = [model for member in members(section.annotation) if (model := model_of(member))]
    kinds = [field_type(model.model_fields[key]) for model in models]
    return Place((*section.path, key), reduce(or_, kinds), _item(section.value, key))


def _is_label(label: Any, member: Any) -> bool:
    """Return whether `label` is pydantic's name for a union member: a class, a tag or
    `tuple[...]`."""
    model = model_of(member)
    if model is None:
        return "[" in str(label)
    tags = [
        choice for field in model.model_fields.values() for choice in choices(field_type(field))
    ]
    return label == model.__name__ or label in tags


def _descend(at: Place, part: Any) -> Place:
    """Return the place of a key or item of the given place."""
    path = (*at.path, str(part))
    model = model_of(members(at.annotation)[0])
    value = _item(at.value, part)
    if model is None:
        return Place(path, item_type(at.annotation, part if isinstance(part, int) else 0), value)
    if part not in model.model_fields:
        return Place(path, at.annotation, value, is_known=False)
    return Place(path, field_type(model.model_fields[part]), value)


def _item(value: Any, part: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    is_inside = isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
    return value[part] if is_inside else None


def _describe(problem: Mapping[str, Any], place: Place, model: Model) -> list[str]:
    """Return the lines about one error, without the file."""
    where, value = ".".join(place.path), format_value(place.value)
    inner = problem.get("ctx", {}).get("error")
    if not place.is_known:
        return [f"{where}: {value}: unknown key{_suggest_key(place, model)}"]
    if problem["type"] == "missing":
        return [f"{where}: missing: expected {describe_type(place.annotation)}"]
    if isinstance(inner, Exception) and isinstance(inner.__cause__, UserError):
        # Validators that raise UserError name the key in their lines.
        return list(inner.__cause__.problems)
    if isinstance(inner, Exception):
        parts = [where, *([] if isinstance(place.value, dict | list) else [value]), str(inner)]
        return [": ".join(filter(None, parts))]
    hint = (
        suggest_nearest(place.value, choices(place.annotation))
        if isinstance(place.value, str)
        else ""
    )
    # Far limits are mentioned only if the value violates one of them.
    is_negative_bound = problem["type"] == "greater_than_equal" and problem["ctx"]["ge"] < 0
    limits = is_negative_bound or problem["type"] in _UPPER_BOUND_ERRORS
    return [f"{where}: {value}: expected {describe_type(place.annotation, limits=limits)}{hint}"]


def _suggest_key(place: Place, model: Model) -> str:
    """Return a hint at the key that an unknown one probably stands for, in its section or
    elsewhere."""
    section = model_of(members(place.annotation)[0])
    name = place.path[-1]
    keys = list(section.model_fields) if section else []
    others = [path for path in iter_key_paths(model) if path != place.path]
    matching_paths = [".".join(path) for path in others if path[-1] == name]
    if matching_paths:
        return f" (did you mean '{matching_paths[0]}'?)"
    return suggest_nearest(name, keys) or f"; expected {', '.join(keys)}"


def _iter_leaves(at: Place) -> Iterator[Place]:
    """Yield all places with plain values whose types are known."""
    if not isinstance(at.value, dict | list | tuple):
        yield at
        return
    chosen = best_member(at.annotation, at.value)
    if chosen is None or not at.is_known:
        return
    keys = at.value if isinstance(at.value, dict) else range(len(at.value))
    for key in keys:
        yield from _iter_leaves(_descend(Place(at.path, chosen, at.value), key))
