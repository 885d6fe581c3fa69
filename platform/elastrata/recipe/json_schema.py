"""The JSON Schema of recipe files, for editors: completion, descriptions, mistakes underlined."""

from __future__ import annotations

from typing import Any

from elastrata.core.environment import installed_workloads
from elastrata.core.workload import workload_class
from elastrata.recipe.phase import LENGTHS
from elastrata.recipe.recipe import Recipe

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DEFS = "#/$defs/"
_ANY_OF = {"oneOf": "anyOf"}
_VARIANT = " (variant)"
_HAS_MODEL = {"anyOf": [{"required": [key]} for key in ("workload", "begin_with")]}
_HAS_LENGTH = {"anyOf": [{"required": [key]} for key in (*LENGTHS, "phases")]}


def recipe_schema() -> dict[str, Any]:
    """The schema of a recipe file, with every installed workload.

    A file with `extends` may leave out what its base says, and a phase what the recipe says; all
    else must be whole.
    """
    defs: dict[str, Any] = {}
    recipe = _hoisted(Recipe.model_json_schema(), defs)
    del defs["Workload"]
    described = recipe["properties"]["workload"]["description"]
    recipe["properties"]["workload"] = {"anyOf": _workloads(defs), "description": described}
    recipe["properties"]["phases"]["items"] = {"$ref": f"{_DEFS}Phase{_VARIANT}"}
    recipe["required"] = [key for key in recipe["required"] if key != "workload"]
    base = "A recipe's file or name; this one says only what is different."
    schema = extending_schema("Recipe", {**recipe, "$defs": defs}, base)
    whole = {"allOf": [schema["else"], _HAS_LENGTH, _HAS_MODEL]}
    return {**schema, "title": "Elastrata recipe", "else": whole}


def extending_schema(name: str, schema: dict[str, Any], base: str) -> dict[str, Any]:
    """The schema of a file that has to be whole, or extends another one and says any part.

    Args:
        name: of what the file holds.
        schema: of a whole one.
        base: the description of the key `extends`.
    """
    defs: dict[str, Any] = {}
    whole = _hoisted(dict(schema), defs)
    extends = {"type": "string", "description": base}
    defs[name] = {**whole, "properties": {**whole["properties"], "extends": extends}}
    variants = {f"{key}{_VARIANT}": _relaxed(value) for key, value in defs.items()}
    return {
        "$schema": DRAFT,
        "type": "object",
        "if": {"required": ["extends"]},
        "then": {"$ref": f"{_DEFS}{name}{_VARIANT}"},
        "else": {"$ref": f"{_DEFS}{name}"},
        "$defs": {**defs, **variants},
    }


def _workloads(defs: dict[str, Any]) -> list[dict[str, Any]]:
    """A reference to the schema of each installed workload."""
    references = []
    for name in sorted(installed_workloads()):
        schema = _hoisted(workload_class(name).model_json_schema(), defs)
        schema["properties"]["name"] = {"const": name, "description": "The workload."}
        schema["required"] = sorted({*schema.get("required", []), "name"})
        defs[f"workload {name}"] = schema
        references.append({"$ref": f"{_DEFS}workload {name}"})
    return references


def _hoisted(schema: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any]:
    """The schema without its definitions, which go to `defs`."""
    defs.update(schema.pop("$defs", {}))
    return schema


def _relaxed(schema: Any) -> Any:
    """A schema in which nothing is required, down to the definitions it refers to. Sections that
    only a required key told apart may then be any of several."""
    if isinstance(schema, list):
        return [_relaxed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        _ANY_OF.get(key, key): _variant(value) if key == "$ref" else _relaxed(value)
        for key, value in schema.items()
        if key != "discriminator" and not (key == "required" and isinstance(value, list))
    }


def _variant(reference: str) -> str:
    return reference if reference.endswith(_VARIANT) else reference + _VARIANT
