"""The text of a recipe: YAML files that extend one another, and overrides from the command line."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastrata.recipe.value_types import Model, replaced_keys, type_below
from elastrata.recipe.yaml_values import MOST_DEPTH, parse_yaml, read_text
from elastrata.workload.installed import installed_workloads
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.url_secrets import hide_secrets, without_secrets

COMMAND_LINE = "command line"
_EXTENDS = "extends"
_MOST_BASES = 32
_MOST_SHOWN = 200


@dataclass
class RecipeText:
    """The values of a recipe, with its bases and overrides, before they have a meaning."""

    file: str
    """The recipe's own file, as the user named it."""
    name: str
    """The run's name where the recipe gives none: the file's, or `bert-tiny` for `bert/tiny`."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Per dotted path the file that said it last, or `command line`."""
    files: list[str] = field(default_factory=list)
    """The recipe's files, the farthest base first."""

    def origin(self, path: Sequence[str]) -> str:
        """Where the value at `path`, or the section it is missing from, was written."""
        for end in range(len(path), 0, -1):
            source = self.origins.get(".".join(path[:end]))
            if source:
                return source
        return self.file

    def level(self, origin: str) -> int:
        """Return the place of an origin among all that say something: a later one has the word."""
        return self.files.index(origin) if origin in self.files else len(self.files)


def read_recipe_text(
    name_or_path: str, overrides: Sequence[str] = (), *, model: Model
) -> RecipeText:
    """Reads a recipe with all it extends, then applies the overrides.

    Args:
        name_or_path: a YAML file, or a name such as `bert/tiny`.
        model: what is read; says which of its sections are alternatives of one another.
        overrides: `dotted.path=value`, the value in YAML.

    Raises:
        UserError: a file is missing or no YAML, a base extends itself, an override has no `=`.
    """
    path = find_recipe(name_or_path)
    is_file = _looks_like_file(name_or_path)
    text = RecipeText(
        file=name_or_path, name=path.stem if is_file else name_or_path.replace("/", "-")
    )
    for shown, values in _with_bases(path, name_or_path, ()):
        text.files.append(shown)
        _merge(text, text.values, values, (), model, shown)
    problems = [problem for override in overrides if (problem := _override(text, override, model))]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return text


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: a path, relative to the folder `beside`, or a name such as `bert/tiny`.
        beside: default: the current folder.

    Raises:
        UserError: there is none.
    """
    if _looks_like_file(name_or_path):
        path = (beside or Path()) / name_or_path
        if not os.path.lexists(path):
            raise UserError(f"{name_or_path}: no such recipe file")
        return path
    known = available_recipes(name_or_path.partition("/")[0])
    if name_or_path not in known:
        raise UserError(
            f"{name_or_path}: no such recipe{nearest(name_or_path, known)}; expected a .yaml file "
            f"or one of {', '.join(sorted(known)) or '(no workload with recipes is installed)'}"
        )
    return known[name_or_path]


def available_recipes(workload: str | None = None) -> dict[str, Path]:
    """The recipes that the installed workloads bring, by name. Imports none of them.

    Args:
        workload: one that is wanted, also where it was installed a moment ago.
    """
    recipes: dict[str, Path] = {}
    for point in installed_workloads(workload).values():
        spec = importlib.util.find_spec(point.module)
        if spec and spec.origin:
            for path in sorted((Path(spec.origin).parent / "recipes").glob("*.yaml")):
                recipes[f"{point.name}/{path.stem}"] = path
    return recipes


def _looks_like_file(name_or_path: str) -> bool:
    # Not pathlib's: it raises for names that are too long.
    return name_or_path.endswith((".yaml", ".yml")) or os.path.isfile(name_or_path)  # noqa: PTH113


def _with_bases(
    path: Path, shown: str, above: tuple[Path, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """The files a recipe consists of, the farthest base first, with the name to show for each."""
    values = _read_file(path, shown)
    real = path.resolve()
    if real in above:
        chain = " -> ".join(file.name for file in (*above, real))
        raise UserError(f"{shown}: extends: the recipe extends itself ({chain})")
    if len(above) > _MOST_BASES:
        raise UserError(f"{shown}: extends: more than {_MOST_BASES} recipes extend one another")
    base = values.pop(_EXTENDS, None)
    if base is None:
        return [(shown, values)]
    if not isinstance(base, str):
        raise UserError(f"{shown}: extends: {_cut(repr(base))}: expected one recipe's file or name")
    try:
        base_path = find_recipe(base, path.parent)
    except UserError as error:
        raise UserError(*(f"{shown}: extends: {problem}" for problem in error.problems)) from None
    bases = _with_bases(base_path, _shown(base_path), (*above, real))
    # A run's name belongs to one recipe: two recipes of one name would be one run.
    return [
        (file, {k: v for k, v in inherited.items() if k != "name"}) for file, inherited in bases
    ] + [(shown, values)]


def _shown(path: Path) -> str:
    """How to call a file: by its recipe's name where it has one, else by its shortest path."""
    names = {file: name for name, file in available_recipes().items()}
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - a link is called as it was named
    return names.get(whole) or min(str(path), os.path.relpath(path), key=len)


def _cut(text: str) -> str:
    text = hide_secrets(without_secrets(text))
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _read_file(path: Path, shown: str) -> dict[str, Any]:
    values = parse_yaml(read_text(path, shown), shown)
    if not isinstance(values, dict | None):
        raise UserError(f"{shown}: expected keys with values, as in 'steps: 1000'")
    return values or {}


def _merge(
    text: RecipeText,
    into: dict[str, Any],
    values: Mapping[str, Any],
    prefix: tuple[str, ...],
    annotation: Any,
    origin: str,
) -> None:
    """Sections are merged, anything else is replaced; so are keys of another alternative."""
    for key in replaced_keys(annotation, into, values):
        del into[key]
    for key, value in values.items():
        path = (*prefix, key)
        text.origins[".".join(path)] = origin
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            below = type_below(annotation, {**into, **values}, key)
            _merge(text, into[key], value, path, below, origin)
        else:
            into[key] = value


def _override(text: RecipeText, override: str, model: Model) -> str | None:
    """Applies one override, or says what is wrong with it."""
    dotted, equals, raw = override.partition("=")
    path = dotted.split(".")
    if not equals or not all(path) or len(path) > MOST_DEPTH:
        return f"{COMMAND_LINE}: {_cut(override)}: expected key=value, such as optimizer.lr=3e-4"
    where = f"{COMMAND_LINE}: {dotted}: {_cut(raw)}"
    try:
        _set(text, path, parse_yaml(raw, where, count_lines=False), model)
    except UserError as error:
        return error.problems[0]
    except LookupError as error:
        return f"{where}: {error.args[0]}"
    text.origins[dotted] = COMMAND_LINE
    return None


def _set(text: RecipeText, path: Sequence[str], value: Any, annotation: Any) -> None:
    """Sets a value below sections and lists, making sections that are missing. What another
    override said stays, whatever alternative it belongs to: both cannot be meant.

    Raises:
        LookupError: the path leads through a plain value or past the end of a list.
    """
    at: Any = text.values
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        key = _key(at, part, path[:depth])
        if is_last:
            if isinstance(at, dict):
                for other in replaced_keys(annotation, at, {part: value}):
                    if text.origins.get(".".join((*path[:-1], other))) != COMMAND_LINE:
                        del at[other]
            at[key] = value
            return
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
        annotation = type_below(annotation, at, key)
        at = at[key]


def _key(at: Any, part: str, path: Sequence[str]) -> str | int:
    """The key or the index that a part of a dotted path means to the value there."""
    if isinstance(at, dict):
        return part
    if not isinstance(at, list):
        raise LookupError(f"{'.'.join(path)} is a value, not a section with keys")
    is_number = part.isascii() and part.isdecimal() and len(part) < len(str(len(at))) + 1
    if not is_number or int(part) >= len(at):
        raise LookupError(f"'{part}': expected a place in the list, 0 to {len(at) - 1}")
    return int(part)
