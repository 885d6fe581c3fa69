"""Cluster files: found by path or name, read with all mistakes told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from elastrata.deploy.cluster_spec import ClusterSpec
from elastrata.deploy.kuberay import KINDS
from elastrata.deploy.launcher import LauncherFile, unknown_keys
from elastrata.recipe.problems import recipe_problems
from elastrata.recipe.yaml_reader import RecipeText
from elastrata.recipe.yaml_values import parse_documents, read_text
from elastrata.shipped import cluster_files
from elastrata_pipelines.errors import UserError, nearest

_Model = TypeVar("_Model", bound=BaseModel)


def read_cluster(name_or_path: str) -> ClusterSpec:
    """The nodes that the cluster of a file can ever have.

    Args:
        name_or_path: a file for Ray's cluster launcher or for KubeRay, or the name of one that
            ships with Elastrata, such as `aws`.

    Raises:
        UserError: one line per mistake, `<file>: <dotted.path>: <value>: <what was expected>`.
    """
    documents = _documents(find_cluster_file(name_or_path), name_or_path)
    for values in documents:
        model = KINDS.get(str(values.get("kind")))
        if model is not None:
            return _checked(model, values, name_or_path).cluster_spec(name_or_path)
    if len(documents) == 1 and "provider" in documents[0]:
        unknown = list(unknown_keys(documents[0], name_or_path))
        return _checked(LauncherFile, documents[0], name_or_path, unknown).cluster_spec(
            name_or_path
        )
    raise UserError(
        f"{name_or_path}: expected a file for Ray's cluster launcher, with `provider`, or a "
        "RayCluster or RayJob of KubeRay"
    )


def find_cluster_file(name_or_path: str) -> Path:
    """The cluster file of a path, or of a name such as `aws`.

    Raises:
        UserError: there is none.
    """
    if name_or_path.endswith((".yaml", ".yml")) or os.path.isfile(name_or_path):  # noqa: PTH113
        if not os.path.lexists(name_or_path):
            raise UserError(f"{name_or_path}: no such cluster file")
        return Path(name_or_path)
    known = {path.stem: path for path in cluster_files().glob("*.yaml")}
    if name_or_path not in known:
        raise UserError(
            f"{name_or_path}: no such cluster{nearest(name_or_path, known)}; expected a .yaml file "
            f"or one of {', '.join(sorted(known))}"
        )
    return known[name_or_path]


def is_launched(path: Path, shown: str) -> bool:
    """Whether a cluster file is for Ray's cluster launcher.

    Raises:
        UserError: it is no YAML.
    """
    return any("provider" in values for values in _documents(path, shown))


def _documents(path: Path, shown: str) -> list[dict[str, Any]]:
    """YAML 1.1, as Ray and Kubernetes read it."""
    documents = parse_documents(read_text(path, shown), shown)
    return [values for values in documents if isinstance(values, dict)]


def _checked(
    model: type[_Model], values: Mapping[str, Any], file: str, unknown: list[str] | None = None
) -> _Model:
    """The part of the values that `model` knows; all mistakes in it, after those of `unknown`."""
    problems = unknown or []
    try:
        checked = model.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=file, name="", values=dict(values))
        raise UserError(*problems, *recipe_problems(error, model, text)) from None
    if problems:
        raise UserError(*problems)
    return checked
