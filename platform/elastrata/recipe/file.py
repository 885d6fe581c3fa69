"""Recipe files: reading, with all mistakes reported together, and writing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from elastrata.recipe.begin_with import BeginWith, read_workload
from elastrata.recipe.problems import find_boolean_problems, format_value, recipe_problems
from elastrata.recipe.recipe import (
    LENGTHS,
    NO_LENGTH,
    PER_PHASE,
    PhaseKeys,
    Recipe,
    inherit_phase_keys,
)
from elastrata.recipe.rules import cross_field_problems
from elastrata.recipe.yaml_reader import (
    Overrides,
    RecipeText,
    override_lines,
    read_recipe_text,
)
from elastrata.recipe.yaml_values import dump_yaml
from elastrata.workload.workload import Workload, workload_class
from elastrata_pipelines.errors import UserError


def load_recipe(recipe: str | Mapping[str, Any], overrides: Overrides = ()) -> Recipe:
    """Return a recipe, validated.

    Args:
        recipe: a YAML file, a name such as `bert/tiny`, or the keys and values of such a file,
            which may have `extends`, too.
        overrides: changes by dotted key, `{"optimizer.lr": 3e-4}`, or `dotted.key=value` with the
            value in YAML, `["optimizer.lr=3e-4"]`.

    Returns:
        The recipe. Its `model_copy(update=...)` makes variants.

    Raises:
        UserError: one line for each mistake, `<file>: <dotted.path>: <value>: <expected value>`.
    """
    text = read_recipe_text(recipe, override_lines(overrides), model=Recipe)
    text.values.setdefault("name", text.name)
    _add_given_workload(text)
    problems = find_boolean_problems(_model_with_workload(text), text) + unused_keys(text)
    try:
        valid = Recipe.model_validate(text.values)
    except ValidationError as error:
        problems = (
            recipe_problems(error, _model_with_workload(text), text)
            + _length_problems(text)
            + problems
        )
        # Members of a union can report the same line.
        raise UserError(*dict.fromkeys(problems)) from None
    problems += [f"{text.origin(path)}: {line}" for path, line in cross_field_problems(valid)]
    if problems:
        raise UserError(*problems)
    valid.__dict__["given"] = text.given
    return valid


def _add_given_workload(text: RecipeText) -> None:
    """Add the workload of the initial weights to a recipe without a workload."""
    if "workload" in text.values or text.values.get("begin_with") is None:
        return
    try:
        begin = TypeAdapter(BeginWith).validate_python(text.values["begin_with"])
    except ValidationError:
        # Validation of the whole recipe reports it.
        return
    try:
        text.values["workload"] = read_workload(begin)
    except UserError as error:
        origin = text.origin(("begin_with",))
        raise UserError(*(f"{origin}: {line}" for line in error.problems)) from None


def parse_stored_recipe(values: Any, file: str) -> Recipe:
    """Return a recipe from values that an earlier run stored.

    Args:
        values: content of the file.
        file: name of the file in errors.

    Raises:
        UserError: the values are invalid; one line for each mistake.
    """
    if not isinstance(values, dict):
        raise UserError(f"{file}: damaged: expected keys with values")
    values = _drop_removed_keys(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=file, name="", values=values)
        raise UserError(*recipe_problems(error, _model_with_workload(text), text)) from None


# Earlier versions wrote these keys, with their defaults too, into the recipe of every run.
_REMOVED_KEYS = (("checkpoint", "hot_parity"),)


def _drop_removed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without keys that no longer exist and never changed a result."""
    kept = dict(values)
    for section, key in _REMOVED_KEYS:
        if isinstance(kept.get(section), dict):
            kept[section] = {name: one for name, one in kept[section].items() if name != key}
    return kept


def _length_problems(text: RecipeText) -> list[str]:
    """Return a line if the recipe and its phases lack a length."""
    phases = text.values.get("phases")
    # `cross_field_problems`, which checks the length, runs only after validation has succeeded.
    parts = phases if isinstance(phases, list) and phases else [text.values]
    sections = [part for part in parts if isinstance(part, dict)]
    if all(text.values.keys() & LENGTHS or part.keys() & LENGTHS for part in sections):
        return []
    return [f"{text.file}: {NO_LENGTH}"]


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML from which `load_recipe` restores an equal one."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _model_with_workload(text: RecipeText) -> type[BaseModel]:
    """Return the recipe's model with the class of its workload, so that the workload's keys are
    known."""
    section = text.values.get("workload")
    name = section.get("name") if isinstance(section, dict) else None
    try:
        workload = workload_class(name) if isinstance(name, str) else None
    except UserError:
        workload = None
    return _create_model_with(workload) if workload else Recipe


@cache
def _create_model_with(workload: type[Workload]) -> type[BaseModel]:
    return create_model("Recipe", __base__=Recipe, workload=(workload, ...))


Path = tuple[str, ...]


def unused_keys(text: RecipeText) -> list[str]:
    """Return a line for each key of the recipe that no phase inherits.

    Keys of a base recipe are not reported if the extending recipe or an override defines the
    phases.

    Args:
        text: text of a recipe.
    """
    phases = text.values.get("phases")
    if not isinstance(phases, list) or not phases:
        return []
    if not all(isinstance(phase, Mapping) for phase in phases):
        # Validation reports the mistake.
        return []
    whole = inherit_phase_keys(text.values)["phases"]
    keys = [key for key in PhaseKeys.model_fields if key in text.values]
    # Stored recipes with phases contain null for the keys in PER_PHASE.
    found = [
        (path, value)
        for key in keys
        for path, value in _iter_leaves(text.values[key], (key,))
        if not (value is None and key in PER_PHASE)
        and not any(_has_value(phase, path, value) for phase in whole)
        and _overrides_phases(text, path, len(phases))
    ]
    return [_vain_key_line(text, path, value, len(phases)) for path, value in found]


def _vain_key_line(text: RecipeText, path: Path, value: Any, count: int) -> str:
    key = ".".join(path)
    instead = f"phases.0.{key}" if count == 1 else f"phases.0.{key} to phases.{count - 1}.{key}"
    return (
        f"{text.origin(path)}: {key}: {format_value(value)}: unused, because every phase has "
        f"its own: expected {instead} instead"
    )


def _iter_leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    # An empty section replaces another value, so it is a leaf as well.
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, below in value.items():
        yield from _iter_leaves(below, (*path, str(key)))


def _has_value(phase: Any, path: Path, value: Any) -> bool:
    """Return whether a phase has this value, of the same type, at a path."""
    for key in path:
        if not isinstance(phase, Mapping) or key not in phase:
            return False
        phase = phase[key]
    # In Python True == 1 and 1 == 1.0.
    return bool(type(phase) is type(value) and phase == value)


def _overrides_phases(text: RecipeText, path: Path, count: int) -> bool:
    """Return whether a key was written in the same file as the corresponding keys of all phases, or
    later."""
    level = text.level(text.origin(path))
    # Any key for the length of a phase replaces all of them.
    roots = LENGTHS if path[0] in LENGTHS else path[:1]
    for number in range(count):
        phase_origins = [text.origin(("phases", str(number), *path))]
        for root in roots:
            place = f"phases.{number}.{root}"
            phase_origins += [
                origin
                for dotted, origin in text.origins.items()
                if dotted == place or dotted.startswith(f"{place}.")
            ]
        if any(text.level(origin) > level for origin in phase_origins):
            return False
    return True
