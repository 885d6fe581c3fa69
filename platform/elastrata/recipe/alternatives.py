"""Alternatives: sections of which one kind or group of keys counts, and what a later choice leaves
of an earlier one.

Where a recipe extends another, or the command line or a phase changes it, a section that names
another alternative leaves out those keys of the other one that it does not have itself.

A section declares groups of keys, of which one counts, as its class variable `either`: the first
key of each group is the one that chooses it. Keys that go with one value of another key are
`only_with`. Unions of sections say it by their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

from elastrata.recipe.value_types import (
    Model,
    best_member,
    choices,
    field_type,
    item_type,
    members,
    model_of,
    split,
)
from elastrata_pipelines.errors import UserError


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
