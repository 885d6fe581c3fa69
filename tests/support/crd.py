"""Kubernetes' custom resource definitions, as a cluster's API server checks them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

_FIELDS = Path(__file__).parents[1] / "data" / "kuberay_fields.yaml"


def crd_problems(resource: dict[str, Any]) -> list[str]:
    """What is wrong with a resource by its definition: unknown fields, too."""
    schema = yaml.safe_load(_FIELDS.read_text(encoding="utf-8"))[resource["kind"]]
    validator = Draft202012Validator(_closed(schema))
    errors = validator.iter_errors(_with_defaults(schema, deepcopy(resource)))
    return [f"{error.json_path}: {error.message}" for error in errors]


def _closed(schema: Any) -> Any:
    """The schema as JSON Schema, with unknown fields forbidden wherever fields are listed."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(inner) for name, inner in value.items()}
        if key == "properties"
        else _closed(value)
        for key, value in schema.items()
    }
    if closed.pop("x-kubernetes-int-or-string", False):
        closed["type"] = ["integer", "string"]
    if "properties" in closed and not closed.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def _with_defaults(schema: dict[str, Any], value: Any) -> Any:
    """The value with what the API server fills in."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = deepcopy(inner["default"])
            if name in value:
                value[name] = _with_defaults(inner, value[name])
    if isinstance(value, list):
        return [_with_defaults(schema.get("items", {}), item) for item in value]
    return value
