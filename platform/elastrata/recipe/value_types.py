"""Types of a recipe's keys: descriptions in words, lookup by path, and replacement of alternatives.

If a section of an extending recipe, an override or a phase selects another alternative, the keys of
the previous alternative are dropped unless the section repeats them.

A section declares mutually exclusive groups of keys in the class variable `either`. The first key
of a group selects it. The class variable `only_with` lists keys that are valid with one value of
another key. Unions of sections declare alternatives with their types.
"""

# pydantic cannot do this: the keys to drop must be known while files are merged, before a complete
# section exists that it could validate.

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
_SAFEGUARD_SIZE = 1000
"""Size from which a bound is considered a mere safeguard."""

_PLAIN = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
}


def field_type(field: FieldInfo) -> Any:
    """Return the annotation of a field including its constraints."""
    return Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation


def split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation without its constraints, and the constraints."""
    constraints: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *added = get_args(annotation)
        for item in added:
            constraints += item.metadata if isinstance(item, FieldInfo) else [item]
    return annotation, tuple(constraints)


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union without None, or the annotation itself if it is not a union."""
    bare, _ = split(annotation)
    if get_origin(bare) not in (Union, types.UnionType):
        return (annotation,)
    return tuple(member for member in get_args(bare) if member is not type(None))


def model_of(annotation: Any) -> Model | None:
    """Return the section class of an annotation, or None for other types."""
    bare, _ = split(annotation)
    return bare if isinstance(bare, type) and issubclass(bare, BaseModel) else None


def item_type(annotation: Any, place: int) -> Any:
    """Return the type of an item of a list or tuple, or of a mapping's values."""
    bare, _ = split(annotation)
    inner = [argument for argument in get_args(bare) if argument is not Ellipsis]
    if not inner:
        return Any
    if get_origin(bare) is tuple and get_args(bare)[-1] is not Ellipsis:
        return inner[min(place, len(inner) - 1)]
    return inner[-1]


def best_member(annotation: Any, value: Any) -> Any:
    """Return the member of a union that `value` matches best: the most similar section, or the
    list."""
    fitting = members(annotation)
    if isinstance(value, dict):
        sections = [member for member in fitting if model_of(member)]
        if len(sections) == 1:
            return sections[0]
        return max(sections, key=lambda member: _match_score(model_of(member), value), default=None)
    if isinstance(value, list | tuple):
        shapes = (list, tuple, Sequence)
        return next((m for m in fitting if get_origin(split(m)[0]) in shapes), None)
    # A plain value does not show which of several members is meant.
    return fitting[0] if len(fitting) == 1 else None


def _match_score(model: Model | None, value: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a sort key: matching name keys, then shared keys, then the fewest missing keys."""
    if model is None:
        return (-1, 0, 0)
    fields = model.model_fields
    # Keys with a single allowed value identify the section.
    named = sum(
        [value.get(name, field.default)] == choices(field_type(field))
        for name, field in fields.items()
    )
    missing = sum(field.is_required() and name not in value for name, field in fields.items())
    return (named, len(fields.keys() & value.keys()), -missing)


def choices(annotation: Any) -> list[str]:
    """Return the texts that an annotation allows literally."""
    return [
        value
        for member in members(annotation)
        if get_origin(split(member)[0]) is Literal
        for value in get_args(split(member)[0])
        if isinstance(value, str)
    ]


def accepts_type(annotation: Any, kind: type) -> bool:
    """Return whether an annotation accepts plain values of a type."""
    bare = [split(member)[0] for member in members(annotation)]
    return Any in bare or any(isinstance(item, type) and issubclass(item, kind) for item in bare)


def describe_type(annotation: Any, *, limits: bool = False) -> str:
    """Return a description of an annotation, such as `a number above 0 or 'auto'`.

    Args:
        annotation: annotation of a key.
        limits: whether to include bounds that are mere safeguards.
    """
    bare, constraints = split(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        descriptions = [
            word
            for member in members(annotation)
            for word in _describe_alternatives(member, limits)
        ]
        words = list(dict.fromkeys(descriptions))
        if type(None) in get_args(bare):
            words.append("null")
        return _join(words, "or")
    if get_origin(bare) is Literal:
        return _join([repr(value) for value in get_args(bare)], "or")
    if model := model_of(annotation):
        return f"a section with {_join(list(model.model_fields), 'and', most=4)}"
    origin = get_origin(bare)
    if origin is tuple and Ellipsis not in get_args(bare):
        items = _join([*map(describe_type, get_args(bare))], "and")
        return f"a list of {len(get_args(bare))}: {items}"
    if origin in (list, tuple, Sequence):
        return (
            f"a list, each item {describe_type(item_type(bare, 0))}"
            f"{_describe_bounds(constraints, limits)}"
        )
    if origin in (dict, Mapping):
        return f"keys with values, each {describe_type(item_type(bare, 0))}"
    return _PLAIN.get(bare, "a value") + _describe_bounds(constraints, limits)


def _describe_alternatives(member: Any, limits: bool) -> list[str]:
    bare, _ = split(member)
    if get_origin(bare) is Literal:
        return [*map(repr, get_args(bare))]
    return [describe_type(member, limits=limits)]


def _describe_bounds(constraints: Sequence[Any], limits: bool) -> str:
    words = []
    for item in constraints:
        if isinstance(item, annotated_types.Gt):
            words.append(f"above {item.gt}")
        elif isinstance(item, annotated_types.Ge):
            words += _describe_bound("at least", item.ge, limits)
        elif isinstance(item, annotated_types.Lt):
            words += _describe_bound("below", item.lt, limits)
        elif isinstance(item, annotated_types.Le):
            words += _describe_bound("at most", item.le, limits)
        elif isinstance(item, annotated_types.MaxLen) and limits:
            words.append(f"(at most {item.max_length:,} of them)")
        elif isinstance(item, annotated_types.MinLen) and item.min_length:
            words.append("(not empty)" if item.min_length == 1 else f"({item.min_length} or more)")
    return f" {' and '.join(words)}" if words else ""


def _describe_bound(word: str, bound: Any, limits: bool) -> list[str]:
    shown = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
    return [f"{word} {shown}"] if limits or abs(bound) < _SAFEGUARD_SIZE else []


def _join(words: list[str], word: str, most: int = 12) -> str:
    if len(words) > most:
        return f"{', '.join(words[:most])}, ..."
    return f" {word} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def iter_key_paths(annotation: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key below an annotation."""
    for member in members(annotation):
        if model := model_of(member):
            for name, field in model.model_fields.items():
                yield (*prefix, name)
                yield from iter_key_paths(field_type(field), (*prefix, name))


def obsolete_keys(annotation: Any, base: Mapping[str, Any], said: Mapping[str, Any]) -> set[str]:
    """Return the keys of a section that belong to an alternative that is no longer selected.

    Args:
        annotation: type of the section.
        base: section before the change.
        said: changed values.
    """
    sections = [model for member in members(annotation) if (model := model_of(member))]
    if len(sections) > 1:
        return (base.keys() - said.keys()) & _keys_of_other_kinds(sections, said)
    replaced = {key for model in sections for key in _keys_of_other_groups(model, said)}
    replaced |= {key for model in sections for key in _keys_of_other_values(model, said)}
    replaced |= {key for model in sections for key in _keys_of_other_workload(model, base, said)}
    return (base.keys() - said.keys()) & replaced


def type_below(annotation: Any, values: Any, key: Any) -> Any:
    """Return the type of a section's key or a list's item, or Any if it is unknown."""
    chosen = best_member(annotation, values) or _find_mapping(annotation)
    if chosen is None:
        return Any
    model = model_of(chosen)
    if model is None:
        return item_type(chosen, key if isinstance(key, int) else 0)
    field = model.model_fields.get(str(key))
    return Any if field is None else field_type(field)


def merge_sections(
    annotation: Any, base: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return two merged sections: nested sections are merged, other values replaced."""
    left_out = obsolete_keys(annotation, base, values)
    kept = {key: value for key, value in base.items() if key not in left_out}
    for key, value in values.items():
        below = kept.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            # The key that names the section's kind may be in the base only.
            kept[key] = merge_sections(
                type_below(annotation, {**base, **values}, key), below, value
            )
        else:
            kept[key] = value
    return kept


def _find_mapping(annotation: Any) -> Any:
    """Return the member of a union with arbitrary keys, or None."""
    shapes = (dict, Mapping)
    return next((m for m in members(annotation) if get_origin(split(m)[0]) in shapes), None)


def _keys_of_other_kinds(sections: list[Model], values: Mapping[str, Any]) -> set[str]:
    """Return the keys of a union's sections that no matching section has."""
    candidates = [model for model in sections if _could_match(model, values)]
    if not candidates:
        return set()  # validation reports the mistake
    kept = {key for model in candidates for key in model.model_fields}
    return {key for model in sections for key in model.model_fields} - kept


def _could_match(model: Model, values: Mapping[str, Any]) -> bool:
    """Return whether values could belong to a section: by its tags, otherwise by all keys."""
    names = {name: choices(field_type(field)) for name, field in model.model_fields.items()}
    tags = [name for name in ("name", "method") if len(names.get(name, ())) == 1]
    if tags:
        return all(key not in values or [values[key]] == names[key] for key in tags)
    return values.keys() <= model.model_fields.keys()


def _keys_of_other_groups(model: Model, values: Mapping[str, Any]) -> set[str]:
    """Return the keys of groups that are not selected."""
    groups = getattr(model, "either", ())
    chosen = [group for group in groups if values.get(group[0]) is not None]
    return {key for group in groups if chosen and group not in chosen for key in group}


def _keys_of_other_values(model: Model, values: Mapping[str, Any]) -> set[str]:
    """Return the keys that require another value of a changed key."""
    only_with = getattr(model, "only_with", {})
    return {
        key
        for key, (other, value) in only_with.items()
        if other in values and values[other] != value
    }


def _keys_of_other_workload(
    model: Model, base: Mapping[str, Any], values: Mapping[str, Any]
) -> set[str]:
    """Return the keys of the previous workload that the new one does not have."""
    # Workload classes are registered by name and not members of a union.
    registered = getattr(model, "registered", None)
    before, now = base.get("name"), values.get("name")
    if registered is None or not isinstance(before, str) or not isinstance(now, str):
        return set()
    try:
        return set(registered(before).model_fields) - set(registered(now).model_fields)
    except UserError:
        return set()  # validation reports the unknown name
