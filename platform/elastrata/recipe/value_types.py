"""The types of a recipe's keys: in words, by place, and which keys a later choice replaces.

Where a recipe extends another, or the command line or a phase changes it, a section that names
another alternative leaves out those keys of the other one that it does not have itself.

A section declares groups of keys, of which one counts, as its class variable `either`: the first
key of each group is the one that chooses it. Keys that go with one value of another key are
`only_with`. Unions of sections say it by their types. Pydantic cannot do this: the keys to leave
out have to be known while files are merged, before there is a whole section to validate."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from elastrata_pipelines.errors import UserError

Model = type[BaseModel]
_FAR_AWAY = 1000
"""The size of a bound that is there for values that nobody means."""

_PLAIN = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}


def field_type(field: FieldInfo) -> Any:
    """The annotation of a field with its constraints."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation without its constraints, and the constraints."""
    constraints: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *added = get_args(annotation)
        for item in added:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    return annotation, tuple(constraints)


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union without None; the annotation itself where it is none."""
    bare, _ = split(annotation)
    if get_origin(bare) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(member for member in get_args(bare) if member is not type(None))


def model_of(annotation: Any) -> Model | None:
    """The section that an annotation stands for, if it stands for one."""
    bare, _ = split(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def item_type(annotation: Any, place: int) -> Any:
    """The type of one item of a list or tuple, or of the values of a mapping."""
    bare, _ = split(annotation)
    inner = [argument for argument in get_args(bare) if argument is not Ellipsis]
    if not inner:
        return Any
    if get_origin(bare) is tuple and get_args(bare)[-1] is not Ellipsis:
        return inner[min(place, len(inner) - 1)]
    return inner[-1]


def best_member(annotation: Any, value: Any) -> Any:
    """The member of a union that `value` means: the section most like it, or the list."""
    fitting = members(annotation)
    if isinstance(value, dict):
        sections = [member for member in fitting if model_of(member)]
        if len(sections) == 1:
            return sections[0]
        return max(sections, key=lambda member: _likeness(model_of(member), value), default=None)
    if isinstance(value, list | tuple):
        shapes = (list, tuple, Sequence)
        return next((m for m in fitting if get_origin(split(m)[0]) in shapes), None)
    return fitting[0] if len(fitting) == 1 else None


def _likeness(model: Model | None, value: Mapping[str, Any]) -> tuple[int, int, int]:
    """First of all the keys that allow one value only, which name the section, must agree."""
    if model is None:
        return (-1, 0, 0)
    fields = model.model_fields
    named = sum(
        [value.get(name, field.default)] == choices(field_type(field))
        for name, field in fields.items()
    )
    missing = sum(field.is_required() and name not in value for name, field in fields.items())
    return (named, len(fields.keys() & value.keys()), -missing)


def choices(annotation: Any) -> list[str]:
    """The texts that an annotation allows by name."""
    return [
        value
        for member in members(annotation)
        if get_origin(split(member)[0]) is Literal
        for value in get_args(split(member)[0])
        if isinstance(value, str)
    ]


def allows(annotation: Any, kind: type) -> bool:
    """Whether plain values of this type are meant."""
    bare = [split(member)[0] for member in members(annotation)]
    return Any in bare or any(isinstance(item, type) and issubclass(item, kind) for item in bare)


def expected(annotation: Any, *, limits: bool = False) -> str:
    """An annotation in words: `a number above 0 or 'auto'`.

    Args:
        annotation: of a key.
        limits: whether to tell, too, of bounds so far away that few people care.
    """
    bare, constraints = split(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        told = [word for member in members(annotation) for word in _alternatives(member, limits)]
        words = list(dict.fromkeys(told))
        if type(None) in get_args(bare):
            words.append("null")
        return _joined(words, "or")
    if get_origin(bare) is Literal:
        return _joined([repr(value) for value in get_args(bare)], "or")
    if model := model_of(annotation):
        return f"a section with {_joined(list(model.model_fields), 'and', most=4)}"
    origin = get_origin(bare)
    if origin is tuple and Ellipsis not in get_args(bare):
        return (
            f"a list of {len(get_args(bare))}: {_joined([*map(expected, get_args(bare))], 'and')}"
        )
    if origin in (list, tuple, Sequence):
        return f"a list, each item {expected(item_type(bare, 0))}{_bounds(constraints, limits)}"
    if origin in (dict, Mapping):
        return f"keys with values, each {expected(item_type(bare, 0))}"
    return _PLAIN.get(bare, "a value") + _bounds(constraints, limits)


def _alternatives(member: Any, limits: bool) -> list[str]:
    bare, _ = split(member)
    if get_origin(bare) is Literal:
        return [*map(repr, get_args(bare))]
    return [expected(member, limits=limits)]


def _bounds(constraints: Sequence[Any], limits: bool) -> str:
    words = []
    for item in constraints:
        if isinstance(item, annotated_types.Gt):
            words.append(f"above {item.gt}")
        elif isinstance(item, annotated_types.Ge):
            words += _far("at least", item.ge, limits)
        elif isinstance(item, annotated_types.Lt):
            words += _far("below", item.lt, limits)
        elif isinstance(item, annotated_types.Le):
            words += _far("at most", item.le, limits)
        elif isinstance(item, annotated_types.MaxLen) and limits:
            words.append(f"(at most {item.max_length:,} of them)")
        elif isinstance(item, annotated_types.MinLen) and item.min_length:
            words.append("(not empty)" if item.min_length == 1 else f"({item.min_length} or more)")
    return f" {' and '.join(words)}" if words else ""


def _far(word: str, bound: Any, limits: bool) -> list[str]:
    shown = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
    return [f"{word} {shown}"] if limits or abs(bound) < _FAR_AWAY else []


def _joined(words: list[str], word: str, most: int = 12) -> str:
    if len(words) > most:
        return f"{', '.join(words[:most])}, ..."
    return f" {word} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def known_paths(annotation: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key below an annotation."""
    for member in members(annotation):
        if model := model_of(member):
            for name, field in model.model_fields.items():
                yield (*prefix, name)
                yield from known_paths(field_type(field), (*prefix, name))


def replaced_keys(annotation: Any, base: Mapping[str, Any], said: Mapping[str, Any]) -> set[str]:
    """The keys of a section that belong to an alternative which is no longer chosen.

    Args:
        annotation: the section's type.
        base: the section as it was.
        said: what is changed in it.
    """
    sections = [model for member in members(annotation) if (model := model_of(member))]
    if len(sections) > 1:
        return (base.keys() - said.keys()) & _of_other_kinds(sections, said)
    replaced = {key for model in sections for key in _of_other_groups(model, said)}
    replaced |= {key for model in sections for key in _of_other_values(model, said)}
    replaced |= {key for model in sections for key in _of_other_name(model, base, said)}
    return (base.keys() - said.keys()) & replaced


def type_below(annotation: Any, values: Any, key: Any) -> Any:
    """The type of what stands under a key of a section, or at a place of a list; Any where nobody
    knows."""
    chosen = best_member(annotation, values) or _mapping(annotation)
    if chosen is None:
        return Any
    model = model_of(chosen)
    if model is None:
        return item_type(chosen, key if isinstance(key, int) else 0)
    field = model.model_fields.get(str(key))
    return Any if field is None else field_type(field)


def merged(annotation: Any, base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Two sections as one: sections in them are merged, anything else is replaced."""
    left_out = replaced_keys(annotation, base, values)
    kept = {key: value for key, value in base.items() if key not in left_out}
    for key, value in values.items():
        below = kept.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            kept[key] = merged(type_below(annotation, {**base, **values}, key), below, value)
        else:
            kept[key] = value
    return kept


def _mapping(annotation: Any) -> Any:
    """The member of a union that has keys of any name; None where there is none."""
    shapes = (dict, Mapping)
    return next((m for m in members(annotation) if get_origin(split(m)[0]) in shapes), None)


def _of_other_kinds(sections: list[Model], said: Mapping[str, Any]) -> set[str]:
    """Keys of a union's sections that none of those has which can be meant."""
    meant = [model for model in sections if _can_mean(model, said)]
    if not meant:  # a mistake, of which its own line tells
        return set()
    kept = {key for model in meant for key in model.model_fields}
    return {key for model in sections for key in model.model_fields} - kept


def _can_mean(model: Model, said: Mapping[str, Any]) -> bool:
    """Whether a section may be of that kind: by the keys that name one, else by all it says."""
    names = {name: choices(field_type(field)) for name, field in model.model_fields.items()}
    tags = [name for name in ("name", "method") if len(names.get(name, ())) == 1]
    if tags:
        return all(key not in said or [said[key]] == names[key] for key in tags)
    return said.keys() <= model.model_fields.keys()


def _of_other_groups(model: Model, said: Mapping[str, Any]) -> set[str]:
    groups = getattr(model, "either", ())
    chosen = [group for group in groups if said.get(group[0]) is not None]
    return {key for group in groups if chosen and group not in chosen for key in group}


def _of_other_values(model: Model, said: Mapping[str, Any]) -> set[str]:
    only_with = getattr(model, "only_with", {})
    return {
        key for key, (other, value) in only_with.items() if other in said and said[other] != value
    }


def _of_other_name(model: Model, base: Mapping[str, Any], said: Mapping[str, Any]) -> set[str]:
    """The keys of a section whose kinds are registered by name elsewhere: workloads."""
    registered = getattr(model, "registered", None)
    before, now = base.get("name"), said.get("name")
    if registered is None or not isinstance(before, str) or not isinstance(now, str):
        return set()
    try:
        return set(registered(before).model_fields) - set(registered(now).model_fields)
    except UserError:  # there is none of that name, of which its own line tells
        return set()
