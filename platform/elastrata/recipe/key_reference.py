"""The reference of all keys of our files, as `docs/keys.md` has it, made from their schemas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Schema = Mapping[str, Any]
_BRANCHES = ("anyOf", "oneOf", "allOf")
_WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "section",
    "null": "null",
}
_INTRODUCTION = """\
# Every key of a recipe

`elastrata schema --keys` prints this page. A key below `phases` is as the one of the same name
outside; one that several kinds of a section have (workloads, optimizers) is listed with each that
differs. At the end are the keys of [a sweep](#every-key-of-a-sweep) and of
[a cluster](#every-key-of-a-cluster).
"""
_SWEEP = """
# Every key of a sweep

Of [a sweep file](sweeps.md). `space.KEY` stands for any dotted key of the recipe.

"""
_CLUSTER = """
# Every key of a cluster

Of [a cluster file](planner.md#the-cluster) of `elastrata plan` and `elastrata simulate`. Those of
Ray and KubeRay have [keys of their own](clusters.md).

"""
_ANY_KEY = "KEY"
_HEADING = "| key | values | default | |\n|---|---|---|---|"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, by its dotted path."""

    path: str
    values: str
    """Which values it takes, in words."""
    default: str
    """As it is written; empty where the key is required or has none of its own."""
    description: str


def key_reference(recipe: Schema, *, sweep: Schema, cluster: Schema) -> str:
    """The page.

    Args:
        recipe: the schema of recipes, with the installed workloads.
        sweep: the schema of sweep files.
        cluster: the schema of cluster files.
    """
    return "".join(
        (
            f"{_INTRODUCTION}\n",
            *_sections(recipe_keys(recipe)),
            _SWEEP,
            _table(file_keys(sweep)),
            _CLUSTER,
            _table(file_keys(cluster)),
        )
    )


def recipe_keys(schema: Schema) -> list[Key]:
    """All keys of a recipe but those below `phases`, which are the same once more."""
    return [key for key in file_keys(schema) if not key.path.startswith("phases.")]


def file_keys(schema: Schema) -> list[Key]:
    """All keys of a file, such as a sweep's, that extends no other."""
    return list(dict.fromkeys(_keys(schema.get("else", schema), schema.get("$defs", {}), ())))


def _sections(keys: Iterable[Key]) -> Iterator[str]:
    """A table for every section at the top, after one for what is in none."""
    for section, below in groupby(sorted(keys, key=_is_below_a_section), key=_section):
        yield f"\n## {section}\n\n{_table(below)}"


def _is_below_a_section(key: Key) -> bool:
    return "." in key.path


def _section(key: Key) -> str:
    return key.path.partition(".")[0] if _is_below_a_section(key) else "At the top"


def _table(keys: Iterable[Key]) -> str:
    lines = [_HEADING]
    for key in keys:
        cells = (f"`{key.path}`", key.values, key.default and f"`{key.default}`", key.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _keys(schema: Schema, defs: Schema, path: tuple[str, ...]) -> Iterator[Key]:
    for branch in _alternatives(schema, defs):
        for name, below in branch.get("properties", {}).items():
            yield Key(
                path=".".join((*path, name)),
                values=_values(below, defs),
                default=json.dumps(below["default"]) if _has_plain_default(below) else "",
                description=_description(below, defs),
            )
            yield from _keys(below, defs, (*path, name))
        items = branch.get("items")
        if isinstance(items, Mapping):
            yield from _keys(items, defs, path)
        any_key = branch.get("additionalProperties")
        if isinstance(any_key, Mapping):
            yield from _keys(any_key, defs, (*path, _ANY_KEY))


def _description(schema: Schema, defs: Schema) -> str:
    """Its own, else that of the section it refers to, which pydantic does not repeat."""
    told = schema.get("description")
    if not told and "$ref" in schema:
        told = defs[schema["$ref"].rpartition("/")[2]].get("description")
    return " ".join((told or "").split())


def _alternatives(schema: Schema, defs: Schema) -> Iterator[Schema]:
    """The schema with what it refers to, one for each that may hold."""
    if "$ref" in schema:
        yield from _alternatives(defs[schema["$ref"].rpartition("/")[2]], defs)
        return
    branches = [branch for name in _BRANCHES for branch in schema.get(name, ())]
    for branch in branches:
        yield from _alternatives(branch, defs)
    if not branches:
        yield schema


def _has_plain_default(schema: Schema) -> bool:
    default = schema.get("default")
    return "default" in schema and not isinstance(default, dict) and default not in (None, [])


def _values(schema: Schema, defs: Schema) -> str:
    words = dict.fromkeys(_value(alternative) for alternative in _alternatives(schema, defs))
    return ", ".join(words)


def _value(schema: Schema) -> str:
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    words = _WORDS.get(str(schema.get("type")), "any")
    bounds = [
        f"{word} {schema[name]:,}"
        for name, word in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if name in schema
    ]
    return " ".join((words, " and ".join(bounds))).strip()
