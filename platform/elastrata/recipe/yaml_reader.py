"""Text of a recipe: YAML files that extend each other, and overrides from the command line."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastrata.recipe.value_types import Model, obsolete_keys, type_below
from elastrata.recipe.yaml_values import MOST_DEPTH, dump_yaml, parse_yaml, read_text
from elastrata.workload.installed import find_workloads
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.url_secrets import hide_secrets, hide_unrecorded_parts

COMMAND_LINE = "command line"
_IN_PYTHON = "recipe"
"""Name, in messages, of a recipe that is given in Python."""
_EXTENDS = "extends"
_GIVEN = "#| "
"""Start of the lines in which a submitted recipe holds the short one."""
_MOST_BASES = 32
_MOST_SHOWN = 200


Overrides = Sequence[str] | Mapping[str, object]
"""Changes of a recipe: `["optimizer.lr=3e-4"]`, or `{"optimizer.lr": 3e-4}`."""


def override_lines(overrides: Overrides) -> Sequence[str]:
    """Return overrides as a command line has them. JSON is YAML, too."""
    if isinstance(overrides, Mapping):
        # `default`: a Path is its text.
        values = {
            path: json.dumps(value, ensure_ascii=False, default=str)
            for path, value in overrides.items()
        }
        return [f"{path}={value}" for path, value in values.items()]
    return [overrides] if isinstance(overrides, str) else overrides


@dataclass
class RecipeText:
    """Values of a recipe after merging bases and overrides, before validation."""

    file: str
    """Recipe file as named by the user."""
    name: str | None
    """Default name of the run: the file's stem, or `bert-tiny` for `bert/tiny`. None: there is no
    default."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """By dotted path, the file that set the value last, or `command line`."""
    files: list[str] = field(default_factory=list)
    """Files of the recipe, the farthest base first."""
    given: str = ""
    """The recipe as the user gave it: its own file, and the overrides as comments."""

    def origin(self, path: Sequence[str]) -> str:
        """Return the file that set the value at `path`, or the section in which it is missing."""
        for end in range(len(path), 0, -1):
            source = self.origins.get(".".join(path[:end]))
            if source:
                return source
        return self.file

    def level(self, origin: str) -> int:
        """Return the precedence of an origin: higher levels override lower ones."""
        # The command line is not a file and overrides all of them.
        return self.files.index(origin) if origin in self.files else len(self.files)


def read_recipe_text(
    recipe: str | Mapping[str, Any], overrides: Sequence[str] = (), *, model: Model
) -> RecipeText:
    """Return a recipe merged with its bases and the overrides.

    Args:
        recipe: a YAML file, a name such as `bert/tiny`, or the keys and values of such a file.
        overrides: `dotted.path=value`, with the value in YAML.
        model: type of the file, which determines the sections that are alternatives of each other.

    Raises:
        UserError: a file is missing or not YAML, a base extends itself, or an override has no `=`.
    """
    if isinstance(recipe, str):
        path = find_recipe(recipe)
        is_file = _looks_like_file(recipe)
        text = RecipeText(file=recipe, name=path.stem if is_file else recipe.replace("/", "-"))
        own = read_text(path, recipe) if is_file else f"{_EXTENDS}: {recipe}\n"
        parts = _read_with_bases(path, recipe, ())
    else:
        # Through JSON: a Path becomes its text, and a tuple a list.
        values = json.loads(json.dumps(recipe, default=str))
        text, own = RecipeText(file=_IN_PYTHON, name=None), dump_yaml(values)
        parts = _add_bases(values, _IN_PYTHON, Path(), ())
    for shown, values in parts:
        text.files.append(shown)
        _merge(text, text.values, values, (), model, shown)
    problems = [
        problem for override in overrides if (problem := _apply_override(text, override, model))
    ]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    text.given = append_overrides(_extract_given(own), overrides)
    return text


def append_overrides(given: str, overrides: Sequence[str]) -> str:
    """Return the text of a recipe with overrides as comments at its end."""
    lines = [f"# {line}" for line in (hide_secrets(one) for one in overrides)]
    return "\n".join([given.rstrip("\n"), *(["# with"] if lines else []), *lines, ""])


def with_given(given: str | None, text: str) -> str:
    """Return the text of a complete recipe that begins with the short one, as comments."""
    return "".join(f"{_GIVEN}{line}\n" for line in (given or "").splitlines()) + text


def _extract_given(text: str) -> str:
    """Return the short recipe that a complete one begins with, or else the text itself."""
    lines = list(takewhile(lambda line: line.startswith(_GIVEN), text.splitlines()))
    return hide_secrets("\n".join(line.removeprefix(_GIVEN) for line in lines) or text)


def find_recipe(name_or_path: str, beside: Path | None = None) -> Path:
    """Return the file of a recipe.

    Args:
        name_or_path: a path relative to the folder `beside`, or a name such as `bert/tiny`.
        beside: default: the current folder.

    Raises:
        UserError: no such recipe exists.
    """
    if _looks_like_file(name_or_path):
        path = (beside or Path()) / name_or_path
        # A broken link is not missing: reading it gives a better message.
        if not os.path.lexists(path):
            raise UserError(f"{name_or_path}: no such recipe file")
        return path
    recipes = available_recipes(name_or_path.partition("/")[0])
    if name_or_path not in recipes:
        raise UserError(
            f"{name_or_path}: no such recipe{suggest_nearest(name_or_path, recipes)}; expected a "
            f".yaml file or one of "
            f"{', '.join(sorted(recipes)) or '(no workload with recipes is installed)'}"
        )
    return recipes[name_or_path]


def available_recipes(workload: str | None = None) -> dict[str, Path]:
    """Return the recipes of installed workloads by name, without importing the workloads.

    Args:
        workload: name of a workload to find even if it was installed after this process started.
    """
    recipes: dict[str, Path] = {}
    for point in find_workloads(workload).values():
        spec = importlib.util.find_spec(point.module)
        if spec and spec.origin:
            for path in sorted((Path(spec.origin).parent / "recipes").glob("*.yaml")):
                recipes[f"{point.name}/{path.stem}"] = path
    return recipes


def _looks_like_file(name_or_path: str) -> bool:
    # Path.is_file raises for names that are too long.
    return name_or_path.endswith((".yaml", ".yml")) or os.path.isfile(name_or_path)  # noqa: PTH113


def _read_with_bases(
    path: Path, shown: str, above: tuple[Path, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the files of a recipe with their names for display, the farthest base first."""
    real = path.resolve()
    values = _read_file(path, shown)
    if real in above:
        chain = " -> ".join(file.name for file in (*above, real))
        raise UserError(f"{shown}: extends: the recipe extends itself ({chain})")
    if len(above) > _MOST_BASES:
        raise UserError(f"{shown}: extends: more than {_MOST_BASES} recipes extend one another")
    return _add_bases(values, shown, path.parent, (*above, real))


def _add_bases(
    values: dict[str, Any], shown: str, folder: Path, above: tuple[Path, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the files that the values of a recipe extend, and these values."""
    base = values.pop(_EXTENDS, None)
    if base is None:
        return [(shown, values)]
    if not isinstance(base, str):
        raise UserError(
            f"{shown}: extends: {_shorten(repr(base))}: expected one recipe's file or name"
        )
    try:
        base_path = find_recipe(base, folder)
    except UserError as error:
        raise UserError(*(f"{shown}: extends: {problem}" for problem in error.problems)) from None
    bases = _read_with_bases(base_path, _display_name(base_path), above)
    # A run's name is not inherited: two recipes with the same name would continue the same run.
    return [
        (file, {k: v for k, v in inherited.items() if k != "name"}) for file, inherited in bases
    ] + [(shown, values)]


def _display_name(path: Path) -> str:
    """Return the name of a file for messages: its recipe's name, or its shortest path."""
    names = {file: name for name, file in available_recipes().items()}
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - keeps the names of links
    return names.get(whole) or min(str(path), os.path.relpath(path), key=len)


def _shorten(text: str) -> str:
    """Return a text without secrets, limited in length."""
    text = hide_secrets(hide_unrecorded_parts(text))
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
    """Merge values into a section in place.

    Nested sections are merged and other values replaced. Keys of alternatives that are no longer
    chosen are removed.
    """
    for key in obsolete_keys(annotation, into, values):
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


def _apply_override(text: RecipeText, override: str, model: Model) -> str | None:
    """Apply one override and return the error message if it is invalid."""
    dotted, equals, raw = override.partition("=")
    path = dotted.split(".")
    if not equals or not all(path) or len(path) > MOST_DEPTH:
        return (
            f"{COMMAND_LINE}: {_shorten(override)}: expected key=value, such as optimizer.lr=3e-4"
        )
    where = f"{COMMAND_LINE}: {dotted}: {_shorten(raw)}"
    try:
        _set_value(text, path, parse_yaml(raw, where, count_lines=False), model)
    except UserError as error:
        return error.problems[0]
    except LookupError as error:
        return f"{where}: {error.args[0]}"
    text.origins[dotted] = COMMAND_LINE
    return None


def _set_value(text: RecipeText, path: Sequence[str], value: Any, annotation: Any) -> None:
    """Set a value below sections and lists, and create missing sections.

    Raises:
        LookupError: the path leads through a plain value or past the end of a list.
    """
    at: Any = text.values
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        key = _resolve_key(at, part, path[:depth])
        if is_last:
            if isinstance(at, dict):
                for other in obsolete_keys(annotation, at, {part: value}):
                    # If overrides name keys of two alternatives, both stay: validation reports the
                    # contradiction.
                    if text.origins.get(".".join((*path[:-1], other))) != COMMAND_LINE:
                        del at[other]
            at[key] = value
            return
        if isinstance(at, dict) and at.get(key) is None:
            at[key] = {}
        annotation = type_below(annotation, at, key)
        at = at[key]


def _resolve_key(at: Any, part: str, path: Sequence[str]) -> str | int:
    """Return the key or index that a part of a dotted path denotes in a value."""
    if isinstance(at, dict):
        return part
    if not isinstance(at, list):
        raise LookupError(f"{'.'.join(path)} is a value, not a section with keys")
    # isdecimal accepts non-ASCII digits, and int rejects texts of more than 4,300 digits.
    is_number = part.isascii() and part.isdecimal() and len(part) < len(str(len(at))) + 1
    if not is_number or int(part) >= len(at):
        raise LookupError(f"'{part}': expected a place in the list, 0 to {len(at) - 1}")
    return int(part)
