"""JSON Schema of recipe files for editors, and the page of all keys, `docs/reference/keys.md`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastrata.recipe.recipe import LENGTHS, Recipe
from elastrata.workload.installed import find_workloads
from elastrata.workload.workload import workload_class

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DEFS = "#/$defs/"
_ANY_OF = {"oneOf": "anyOf"}
_VARIANT = " (variant)"
# Rules between keys that pydantic's schema does not express.
_HAS_MODEL = {"anyOf": [{"required": [key]} for key in ("workload", "begin_with")]}
_HAS_LENGTH = {"anyOf": [{"required": [key]} for key in (*LENGTHS, "phases")]}


def recipe_schema() -> dict[str, Any]:
    """Return the schema of a recipe file with all installed workloads.

    A file with `extends` may omit any key, and a phase may omit keys that the recipe has.
    """
    defs: dict[str, Any] = {}
    recipe = _hoist_definitions(Recipe.model_json_schema(), defs)
    # The schemas of installed workloads replace that of their base class.
    del defs["Workload"]
    description = recipe["properties"]["workload"]["description"]
    recipe["properties"]["workload"] = {
        "anyOf": _workload_references(defs),
        "description": description,
    }
    # Phases inherit keys, so none is required.
    recipe["properties"]["phases"]["items"] = {"$ref": f"{_DEFS}Phase{_VARIANT}"}
    # `begin_with` can replace `workload`.
    recipe["required"] = [key for key in recipe["required"] if key != "workload"]
    base = "File or name of the recipe that this one changes."
    schema = extending_schema("Recipe", {**recipe, "$defs": defs}, base)
    whole = {"allOf": [schema["else"], _HAS_LENGTH, _HAS_MODEL]}
    return {**schema, "title": "Elastrata recipe", "else": whole}


def extending_schema(name: str, schema: dict[str, Any], base: str) -> dict[str, Any]:
    """Return the schema of a file that is complete, or extends another file and may omit any key.

    Args:
        name: name of the definition.
        schema: schema of a complete file.
        base: description of the key `extends`.
    """
    defs: dict[str, Any] = {}
    whole = _hoist_definitions(dict(schema), defs)
    extends = {"type": "string", "description": base}
    defs[name] = {**whole, "properties": {**whole["properties"], "extends": extends}}
    variants = {f"{key}{_VARIANT}": _relax(value) for key, value in defs.items()}
    return {
        "$schema": DRAFT,
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": f"{_DEFS}{name}{_VARIANT}"},
        "else": {"$ref": f"{_DEFS}{name}"},
        "$defs": {**defs, **variants},
    }


def _workload_references(defs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a reference to the schema of each installed workload."""
    references = []
    for name in sorted(find_workloads()):
        schema = _hoist_definitions(workload_class(name).model_json_schema(), defs)
        schema["properties"]["name"] = {"const": name, "description": "The workload."}
        schema["required"] = sorted({*schema.get("required", []), "name"})
        defs[f"workload {name}"] = schema
        references.append({"$ref": f"{_DEFS}workload {name}"})
    return references


def _hoist_definitions(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """Move the definitions of a schema into `defs` and return the rest."""
    defs.update(schema.pop("$defs", {}))
    return schema


def _relax(schema: Any) -> Any:
    """Return the schema without required keys, including the definitions that it references."""
    if isinstance(schema, list):
        return [_relax(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    # Without required keys a section may match several branches, which `oneOf` would reject.
    return {
        _ANY_OF.get(key, key): _relaxed_reference(value) if key == "$ref" else _relax(value)
        for key, value in schema.items()
        if key != "discriminator" and not (key == "required" and isinstance(value, list))
    }


def _relaxed_reference(reference: str) -> str:
    return reference if reference.endswith(_VARIANT) else reference + _VARIANT


Schema = Mapping[str, Any]
_BRANCHES = ("anyOf", "oneOf", "allOf")
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "array": "list",
    "object": "section",
    "null": "null",
}
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
_INTRODUCTION = """\
# Every key of a recipe

`elastrata schema --keys` prints this page. Keys below `phases` equal the keys of the same name
outside. If kinds of a section (workloads, optimizers) share a key, the page repeats it only for
those in which it differs. The keys of [a sweep](#every-key-of-a-sweep) and of
[a cluster](#every-key-of-a-cluster) follow.
"""
_SWEEP = """
# Every key of a sweep

These are the keys of [a sweep file](../how-to/sweeps.md). `space.KEY` stands for any dotted key
of the recipe.

"""
_CLUSTER = """
# Every key of a cluster

These are the keys of [a cluster file](../explanation/planner.md#the-cluster) for `elastrata plan`
and `elastrata simulate`. Cluster files of Ray and KubeRay have [other keys](../how-to/clusters.md).

"""
_ANY_KEY = "KEY"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One row of the table of keys."""

    path: str
    values: str
    """Accepted values in words."""
    default: str
    """Default as written in YAML; empty for required keys and sections."""
    description: str


def key_reference(recipe: Schema, *, sweep: Schema, cluster: Schema) -> str:
    """Return the Markdown page of all keys.

    Args:
        recipe: schema of recipes, with the installed workloads.
        sweep: schema of sweep files.
        cluster: schema of cluster files.
    """
    keys = recipe_keys(recipe)
    tables = {"At the top": [key for key in keys if "." not in key.path]}
    for key in (key for key in keys if "." in key.path):
        tables.setdefault(key.path.partition(".")[0], []).append(key)
    sections = "".join(f"\n## {name}\n\n{_table(below)}" for name, below in tables.items())
    page = (f"{_INTRODUCTION}\n", sections, _SWEEP, _table(file_keys(sweep)))
    return "".join((*page, _CLUSTER, _table(file_keys(cluster))))


def recipe_keys(schema: Schema) -> list[Key]:
    """Return all keys of a recipe without those below `phases`, which repeat the others."""
    return [key for key in file_keys(schema) if not key.path.startswith("phases.")]


def file_keys(schema: Schema) -> list[Key]:
    """Return all keys of a complete file, such as a sweep's."""
    # Kinds of a section share keys, and equal rows are listed once.
    return list(dict.fromkeys(_iter_keys(schema.get("else", schema), schema.get("$defs", {}), "")))


def _table(keys: Iterable[Key]) -> str:
    lines = ["| key | values | default | |\n|---|---|---|---|"]
    for key in keys:
        cells = (f"`{key.path}`", key.values, key.default and f"`{key.default}`", key.description)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _iter_keys(schema: Schema, defs: Schema, prefix: str) -> Iterator[Key]:
    for branch in _alternatives(schema, defs):
        for name, below in branch.get("properties", {}).items():
            default = below.get("default")
            is_plain = "default" in below and not isinstance(default, dict)
            # pydantic does not repeat the description of a section that a key refers to.
            description = {**defs.get(_referenced_name(below), {}), **below}.get("description", "")
            yield Key(
                path=f"{prefix}{name}",
                values=", ".join(dict.fromkeys(map(_describe_values, _alternatives(below, defs)))),
                default=json.dumps(default) if is_plain and default not in (None, []) else "",
                description=" ".join(description.split()),
            )
            yield from _iter_keys(below, defs, f"{prefix}{name}.")
        for inner, added in (("items", ""), ("additionalProperties", f"{_ANY_KEY}.")):
            if isinstance(branch.get(inner), Mapping):
                yield from _iter_keys(branch[inner], defs, prefix + added)


def _referenced_name(schema: Schema) -> str:
    return str(schema.get("$ref", "")).rpartition("/")[2]


def _alternatives(schema: Schema, defs: Schema) -> Iterator[Schema]:
    """Yield each alternative schema, with references resolved."""
    if "$ref" in schema:
        yield from _alternatives(defs[_referenced_name(schema)], defs)
        return
    branches = [branch for name in _BRANCHES for branch in schema.get(name, ())]
    for branch in branches:
        yield from _alternatives(branch, defs)
    if not branches:
        yield schema


def _describe_values(schema: Schema) -> str:
    if values := [schema["const"]] if "const" in schema else schema.get("enum"):
        return ", ".join(f"`{value}`" for value in values)
    bounds = [f"{word} {schema[name]:,}" for name, word in _BOUNDS.items() if name in schema]
    return f"{_TYPES.get(str(schema.get('type')), 'any')} {' and '.join(bounds)}".strip()
