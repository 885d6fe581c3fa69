"""Recipes on disk: read, with all mistakes reported together, and written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from elastrata.recipe.begin_with import BeginWith, given_workload
from elastrata.recipe.problems import misread_booleans, recipe_problems, shown_value
from elastrata.recipe.recipe import LENGTHS, NO_LENGTH, PER_PHASE, PhaseKeys, Recipe, with_inherited
from elastrata.recipe.rules import cross_field_problems
from elastrata.recipe.yaml_reader import RecipeText, read_recipe_text
from elastrata.recipe.yaml_values import dump_yaml
from elastrata.workload.workload import Workload, workload_class
from elastrata_pipelines.errors import UserError


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe.

    Args:
        name_or_path: a YAML file, or a name such as `bert/tiny`.
        overrides: `dotted.path=value`, the value in YAML.

    Raises:
        UserError: one line per mistake, `<file>: <dotted.path>: <value>: <what was expected>`.
    """
    text = read_recipe_text(name_or_path, overrides, model=Recipe)
    text.values.setdefault("name", text.name)
    _take_workload(text)
    problems = misread_booleans(_described(text), text) + vain_keys(text)
    try:
        recipe = Recipe.model_validate(text.values)
    except ValidationError as error:
        problems = recipe_problems(error, _described(text), text) + _lengths(text) + problems
        raise UserError(*dict.fromkeys(problems)) from None
    problems += [f"{text.origin(path)}: {line}" for path, line in cross_field_problems(recipe)]
    if problems:
        raise UserError(*problems)
    return recipe


def _take_workload(text: RecipeText) -> None:
    """Where nothing says what the model is, it is that of the weights that the run begins with."""
    if "workload" in text.values or text.values.get("begin_with") is None:
        return
    try:
        begin = TypeAdapter(BeginWith).validate_python(text.values["begin_with"])
    except ValidationError:  # of which its own line tells
        return
    try:
        text.values["workload"] = given_workload(begin)
    except UserError as error:
        origin = text.origin(("begin_with",))
        raise UserError(*(f"{origin}: {line}" for line in error.problems)) from None


def stored_recipe(values: Any, file: str) -> Recipe:
    """The recipe that was written down before.

    Args:
        values: what its file holds.
        file: what to call it in an error.

    Raises:
        UserError: it is damaged; one line per mistake.
    """
    if not isinstance(values, dict):
        raise UserError(f"{file}: damaged: expected keys with values")
    values = _without_removed_keys(values)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        text = RecipeText(file=file, name="", values=values)
        raise UserError(*recipe_problems(error, _described(text), text)) from None


# Earlier versions wrote these keys, with their defaults too, into the recipe of every run.
_REMOVED_KEYS = (("checkpoint", "hot_parity"),)


def _without_removed_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Return a stored recipe without the keys that no longer exist and change no result."""
    kept = dict(values)
    for section, key in _REMOVED_KEYS:
        if isinstance(kept.get(section), dict):
            kept[section] = {name: one for name, one in kept[section].items() if name != key}
    return kept


def _lengths(text: RecipeText) -> list[str]:
    """A line where nothing says how long the run is, which the model alone could not tell."""
    phases = text.values.get("phases")
    parts = phases if isinstance(phases, list) and phases else [text.values]
    sections = [part for part in parts if isinstance(part, dict)]
    if all(text.values.keys() & LENGTHS or part.keys() & LENGTHS for part in sections):
        return []
    return [f"{text.file}: {NO_LENGTH}"]


def to_yaml(recipe: Recipe) -> str:
    """The recipe as a file that `load_recipe` reads back to an equal one."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _described(text: RecipeText) -> type[BaseModel]:
    """The recipe's model with the class of its workload in it, so that its keys are known."""
    section = text.values.get("workload")
    name = section.get("name") if isinstance(section, dict) else None
    try:
        workload = workload_class(name) if isinstance(name, str) else None
    except UserError:
        workload = None
    return _with_workload(workload) if workload else Recipe


@cache
def _with_workload(workload: type[Workload]) -> type[BaseModel]:
    return create_model("Recipe", __base__=Recipe, workload=(workload, ...))


Path = tuple[str, ...]


def vain_keys(text: RecipeText) -> list[str]:
    """Return a line for each key that no phase takes, though it was said after the phases had said
    theirs, or with them: in the same file, or on the command line. What a base says is no mistake
    of the recipe that extends it.

    Args:
        text: of a recipe.
    """
    phases = text.values.get("phases")
    if not isinstance(phases, list) or not phases:
        return []
    if not all(isinstance(phase, Mapping) for phase in phases):
        return []  # a mistake, of which its own line tells
    whole = with_inherited(text.values)["phases"]
    keys = [key for key in PhaseKeys.model_fields if key in text.values]
    found = [
        (path, value)
        for key in keys
        for path, value in _leaves(text.values[key], (key,))
        if not (value is None and key in PER_PHASE)
        and not any(_is_same(phase, path, value) for phase in whole)
        and _is_after(text, path, len(phases))
    ]
    return [_line(text, path, value, len(phases)) for path, value in found]


def _line(text: RecipeText, path: Path, value: Any, count: int) -> str:
    key = ".".join(path)
    instead = f"phases.0.{key}" if count == 1 else f"phases.0.{key} to phases.{count - 1}.{key}"
    return (
        f"{text.origin(path)}: {key}: {shown_value(value)}: no phase takes it, as each has its "
        f"own: expected {instead} in its place"
    )


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, below in value.items():
        yield from _leaves(below, (*path, str(key)))


def _is_same(phase: Any, path: Path, value: Any) -> bool:
    """Whether a phase has that very value there."""
    for key in path:
        if not isinstance(phase, Mapping) or key not in phase:
            return False
        phase = phase[key]
    return bool(type(phase) is type(value) and phase == value)


def _is_after(text: RecipeText, path: Path, count: int) -> bool:
    """Whether a key was said with what each phase has in its place, or later."""
    level = text.level(text.origin(path))
    roots = LENGTHS if path[0] in LENGTHS else path[:1]
    for number in range(count):
        own = [text.origin(("phases", str(number), *path))]
        for root in roots:
            place = f"phases.{number}.{root}"
            own += [
                origin
                for said, origin in text.origins.items()
                if said == place or said.startswith(f"{place}.")
            ]
        if any(text.level(origin) > level for origin in own):
            return False
    return True
