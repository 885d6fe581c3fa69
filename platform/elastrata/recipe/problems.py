"""The mistakes in a recipe, a line each, in the words of the one who wrote it."""

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
    allows,
    best_member,
    choices,
    expected,
    field_type,
    item_type,
    known_paths,
    members,
    model_of,
)
from elastrata.recipe.yaml_reader import RecipeText
from elastrata_pipelines.configured_text import MOST_CHARACTERS
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.url_secrets import without_secrets

_SHOWN_CHARACTERS = 60
_SHOWN_PROBLEMS = 50
_TOO_MUCH = {"less_than", "less_than_equal", "too_long", "string_too_long"}
"""The types of pydantic's errors about values beyond an upper bound."""


@dataclass(frozen=True)
class Place:
    """One place in a recipe: its path, what stands there and what should."""

    path: tuple[str, ...]
    annotation: Any
    value: Any
    is_known: bool = True


def recipe_problems(error: ValidationError, model: Model, text: RecipeText) -> list[str]:
    """The lines for everything that pydantic found, each named once.

    Args:
        error: what validation raised.
        model: the section that was validated, with the workload's own class in it.
        text: the values that were validated, and where they come from.
    """
    said: list[str] = []
    inherited: list[str] = []
    flat, values = list(_flat(error, ())), _whole_phases(text.values)
    for problem in flat[:_SHOWN_PROBLEMS]:
        place = _locate(model, problem["loc"], values)
        if place is not None and problem["type"] == "union_tag_invalid":
            place = _kind(place, problem["ctx"]["discriminator"].strip("'"))
        if place is not None and not _follows_from_others(problem, place):
            origin = text.origin(place.path)
            lines = [f"{origin}: {line}" for line in _tell(problem, place, model)]
            (inherited if _is_inherited(place.path, text.values) else said).extend(lines)
    if more := flat[_SHOWN_PROBLEMS:]:
        said.append(f"{text.file}: and {len(more)} more mistakes")
    return _fullest(list(dict.fromkeys(said or inherited)))


def _whole_phases(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values that pydantic has validated: phases have what they take from the recipe."""
    if "phases" not in values:
        return values
    from elastrata.recipe.recipe import with_inherited  # torch, which other files need not wait for

    return with_inherited(values)


def _fullest(lines: list[str]) -> list[str]:
    """From lines about one value, which members of a union refuse for reasons of their own, the one
    that says most."""
    by_value: dict[str, str] = {}
    for line in lines:
        value, expected_is, _ = line.partition(": expected ")
        key = value if expected_is else line
        by_value[key] = max(by_value.get(key, ""), line, key=len)
    return list(by_value.values())


def misread_booleans(model: Model, text: RecipeText) -> list[str]:
    """The places where `true` or `false` stands for a number: pydantic would take it as 1 or 0."""
    return [
        f"{text.origin(place.path)}: {'.'.join(place.path)}: {shown_value(place.value)}: "
        f"expected {expected(place.annotation)}"
        for place in _leaves(Place((), model, text.values))
        if isinstance(place.value, bool) and place.is_known and not allows(place.annotation, bool)
    ]


def shown_value(value: Any) -> str:
    """A value as YAML would have it, in one line, cut where it is long, and without secrets."""
    if isinstance(value, str):
        shown = repr(without_secrets(value)[:MOST_CHARACTERS])
    else:
        part = _part(value, [_SHOWN_CHARACTERS])
        dumped = yaml.safe_dump(part, default_flow_style=True, width=10**9, sort_keys=False)
        shown = dumped.removesuffix("\n...\n").strip()
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 3]}..."


def _part(value: Any, room: list[int]) -> Any:
    """As much of a value as may be shown: so many texts, numbers, lists and sections of it."""
    room[0] -= 1
    if isinstance(value, str):
        return without_secrets(value)[:MOST_CHARACTERS]  # cut first, a URL may lose its @
    if isinstance(value, Mapping):
        return {_part(k, room): _part(v, room) for k, v in value.items() if room[0] > 0}
    if isinstance(value, list | tuple):
        return [_part(item, room) for item in value if room[0] > 0]
    return value


def _flat(error: ValidationError, prefix: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """All errors, with those of sections that validate themselves at their place."""
    for problem in error.errors(include_url=False):
        inner = problem.get("ctx", {}).get("error")
        loc = prefix + tuple(problem["loc"])
        if isinstance(inner, ValidationError):
            yield from _flat(inner, loc)
        else:
            yield {**problem, "loc": loc}


def _follows_from_others(problem: Mapping[str, Any], place: Place) -> bool:
    """Whether a list only seems too short because its items, each told of, are wrong."""
    if problem["type"] != "too_short" or not isinstance(place.value, Sized):
        return False
    return len(place.value) >= int(problem["ctx"]["min_length"])


def _is_inherited(path: Sequence[str], values: Any) -> bool:
    """Whether a phase did not say this itself but took it from the recipe, where it is told of."""
    if path[:1] != ("phases",):
        return False
    for part in path:
        if isinstance(values, Mapping) and part not in values:
            return True
        values = _item(values, int(part) if isinstance(values, list | tuple) else part)
    return False


def _locate(model: Model, loc: Sequence[Any], values: Any) -> Place | None:
    """Follows pydantic's location, which names union members too, down to a place.

    None where it leads into a member of a union that the value does not mean.
    """
    at = Place((), model, values)
    parts = list(loc)
    while parts:
        union = members(at.annotation)
        if len(union) > 1:
            chosen = best_member(at.annotation, at.value)
            if chosen is None:
                return at
            if not _is_label(parts.pop(0), chosen):
                return None
            at = Place(at.path, chosen, at.value)
            continue
        at = _below(at, parts.pop(0))
        if not at.is_known:
            return at
    return at


def _kind(section: Place, key: str) -> Place:
    """The place of the key that says which of a union's sections is meant."""
    models = [model for member in members(section.annotation) if (model := model_of(member))]
    kinds = [field_type(model.model_fields[key]) for model in models]
    return Place((*section.path, key), reduce(or_, kinds), _item(section.value, key))


def _is_label(label: Any, member: Any) -> bool:
    """Whether pydantic means this member of a union by `label`: a class, a tag or `tuple[...]`."""
    model = model_of(member)
    if model is None:
        return "[" in str(label)
    tags = [
        choice for field in model.model_fields.values() for choice in choices(field_type(field))
    ]
    return label == model.__name__ or label in tags


def _below(at: Place, part: Any) -> Place:
    """The place one key or item further down."""
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


def _tell(problem: Mapping[str, Any], place: Place, model: Model) -> list[str]:
    """The lines about one error, without the file."""
    where, value = ".".join(place.path), shown_value(place.value)
    inner = problem.get("ctx", {}).get("error")
    if not place.is_known:
        return [f"{where}: {value}: unknown key{_meant(place, model)}"]
    if problem["type"] == "missing":
        return [f"{where}: missing: expected {expected(place.annotation)}"]
    if isinstance(inner, Exception) and isinstance(inner.__cause__, UserError):
        return list(inner.__cause__.problems)
    if isinstance(inner, Exception):
        told = [where, *([] if isinstance(place.value, dict | list) else [value]), str(inner)]
        return [": ".join(filter(None, told))]
    hint = nearest(place.value, choices(place.annotation)) if isinstance(place.value, str) else ""
    below = problem["type"] == "greater_than_equal" and problem["ctx"]["ge"] < 0
    limits = below or problem["type"] in _TOO_MUCH
    return [f"{where}: {value}: expected {expected(place.annotation, limits=limits)}{hint}"]


def _meant(place: Place, model: Model) -> str:
    """The key that an unknown one probably stands for: beside it, or elsewhere in the recipe."""
    here = model_of(members(place.annotation)[0])
    name = place.path[-1]
    known = list(here.model_fields) if here else []
    others = [path for path in known_paths(model) if path != place.path]
    elsewhere = [".".join(path) for path in others if path[-1] == name]
    if elsewhere:
        return f" (did you mean '{elsewhere[0]}'?)"
    return nearest(name, known) or f"; expected {', '.join(known)}"


def _leaves(at: Place) -> Iterator[Place]:
    """All places that hold plain values and that the recipe's model knows."""
    if not isinstance(at.value, dict | list | tuple):
        yield at
        return
    chosen = best_member(at.annotation, at.value)
    if chosen is None or not at.is_known:
        return
    keys = at.value if isinstance(at.value, dict) else range(len(at.value))
    for key in keys:
        yield from _leaves(_below(Place(at.path, chosen, at.value), key))
