"""The text of a recipe: YAML files that extend one another, and overrides from the command line."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from elastrata.recipe.rivals import rivals_of, without_rivals
from elastrata_pipelines.errors import UserError, nearest

ENTRY_POINTS = "elastrata.workloads"
COMMAND_LINE = "command line"
_EXTENDS = "extends"


@dataclass
class RecipeText:
    """What a recipe says, with its bases and overrides, before anything gives it a meaning."""

    file: str
    """The recipe's own file, as the user named it."""
    name: str
    """The run's name where the recipe gives none: the file's, or `bert-tiny` for `bert/tiny`."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Per dotted path the file that said it last, or `command line`."""

    def origin(self, path: Sequence[str]) -> str:
        """Where the value at `path`, or the section it is missing from, was written."""
        for end in range(len(path), 0, -1):
            found = self.origins.get(".".join(path[:end]))
            if found:
                return found
        return self.file


def read_recipe_text(name_or_path: str, overrides: Sequence[str] = ()) -> RecipeText:
    """Reads a recipe with all it extends, then applies the overrides.

    Args:
        name_or_path: a YAML file, or a name such as `bert/tiny`.
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
        _merge(text, text.values, values, (), shown)
    problems = [problem for override in overrides if (problem := _override(text, override))]
    if problems:
        raise UserError(*problems)
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
        if not path.is_file():
            raise UserError(f"{name_or_path}: no such recipe file")
        return path
    known = available_recipes()
    if name_or_path not in known:
        raise UserError(
            f"{name_or_path}: no such recipe{nearest(name_or_path, known)}; expected a .yaml file "
            f"or one of {', '.join(sorted(known)) or '(no workload with recipes is installed)'}"
        )
    return known[name_or_path]


def available_recipes() -> dict[str, Path]:
    """The recipes that the installed workloads bring, by name. Imports none of them."""
    found: dict[str, Path] = {}
    for point in entry_points(group=ENTRY_POINTS):
        spec = importlib.util.find_spec(point.module)
        if spec and spec.origin:
            for path in sorted((Path(spec.origin).parent / "recipes").glob("*.yaml")):
                found[f"{point.name}/{path.stem}"] = path
    return found


def parse_yaml(text: str, where: str, *, count_lines: bool = True) -> Any:
    """Reads YAML 1.2 scalars: `3e-4` is a number, `yes` is text. A key given twice is an error.

    Args:
        text: the YAML.
        where: what to call it in an error, for example the file.
        count_lines: whether to name the line, too.

    Raises:
        UserError: the text is no YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and count_lines else ""
        raise UserError(
            f"{where}{line}: not valid YAML: {error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core schema instead of 1.1's, which reads `3e-4` as text and `1:30` as 90."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own shape

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key is not text", problem_mark=key.start_mark)
            if key.value in seen and key.value != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{key.value}' is given twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
        r"|[-+]?\.(?:inf|Inf)|\.(?:nan|NaN)",
        list("-+.0123456789"),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )


def _looks_like_file(name_or_path: str) -> bool:
    return name_or_path.endswith((".yaml", ".yml")) or Path(name_or_path).is_file()


def _with_bases(
    path: Path, shown: str, above: tuple[Path, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """The files a recipe consists of, the farthest base first, with the name to show for each."""
    real = path.resolve()
    if real in above:
        chain = " -> ".join(file.name for file in (*above, real))
        raise UserError(f"{shown}: extends: the recipe extends itself ({chain})")
    values = _read_file(path, shown)
    base = values.pop(_EXTENDS, None)
    if base is None:
        return [(shown, values)]
    if not isinstance(base, str):
        raise UserError(f"{shown}: extends: {base!r}: expected one recipe's file or name")
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
    names = {file.resolve(): name for name, file in available_recipes().items()}
    return names.get(path.resolve()) or min(str(path), os.path.relpath(path), key=len)


def _read_file(path: Path, shown: str) -> dict[str, Any]:
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"), shown)
    except OSError as error:
        raise UserError(f"{shown}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{shown}: not UTF-8 text") from None
    if not isinstance(values, dict | None):
        raise UserError(f"{shown}: expected keys with values, as in 'steps: 1000'")
    return values or {}


def _merge(
    text: RecipeText,
    into: dict[str, Any],
    values: Mapping[str, Any],
    prefix: tuple[str, ...],
    origin: str,
) -> None:
    """Sections are merged, anything else is replaced."""
    for key in into.keys() - without_rivals(into, values).keys():
        del into[key]
    for key, value in values.items():
        path = (*prefix, key)
        text.origins[".".join(path)] = origin
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(text, into[key], value, path, origin)
        else:
            into[key] = value


def _override(text: RecipeText, override: str) -> str | None:
    """Applies one override, or says what is wrong with it."""
    dotted, equals, raw = override.partition("=")
    if not equals or not all(dotted.split(".")):
        return f"{COMMAND_LINE}: {override}: expected key=value, such as optimizer.lr=3e-4"
    where = f"{COMMAND_LINE}: {dotted}: {raw}"
    try:
        value = parse_yaml(raw, where, count_lines=False)
        _set(text.values, dotted.split("."), value)
    except UserError as error:
        return error.problems[0]
    except LookupError as error:
        return f"{where}: {error.args[0]}"
    text.origins[dotted] = COMMAND_LINE
    return None


def _set(at: Any, path: Sequence[str], value: Any) -> None:
    """Sets a value below sections and lists, making sections that are missing.

    Raises:
        LookupError: the path leads through a plain value or past the end of a list.
    """
    for depth, part in enumerate(path):
        is_last = depth == len(path) - 1
        if isinstance(at, list):
            if not part.isdigit() or int(part) >= len(at):
                raise LookupError(f"'{part}': expected a place in the list, 0 to {len(at) - 1}")
            key: Any = int(part)
        elif isinstance(at, dict):
            key = part
            if not is_last and at.get(key) is None:
                at[key] = {}
        else:
            raise LookupError(f"{'.'.join(path[:depth])} is a value, not a section with keys")
        if is_last:
            if isinstance(at, dict) and value is not None:
                for rival in rivals_of(key):
                    at.pop(rival, None)
            at[key] = value
        at = at[key]
