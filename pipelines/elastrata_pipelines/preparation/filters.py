"""Filters: keep or skip documents by length, by an expression, or by an installed function."""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from elastrata_pipelines.configured_text import ConfigPart
from elastrata_pipelines.errors import UserError, escape_unprintable, suggest_nearest

ENTRY_POINTS = "elastrata.filters"
"""Entry point group of functions that take a text and return whether it is kept."""
_OFFERED: dict[str, Any] = {
    "abs": abs, "all": all, "any": any, "float": float, "int": int, "len": len, "max": max,
    "min": min, "re": re, "round": round, "set": set, "sorted": sorted, "str": str, "sum": sum,
}  # fmt: skip
"""Names that an expression may use in addition to `text`."""
_SHOWN_CHARACTERS = 60


class FilterConfig(ConfigPart):
    """Conditions that a document must all meet to be kept."""

    either: ClassVar = (("expression",), ("function",))

    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Name under which rejected documents are counted. Default: the filter's conditions."""
    min_characters: Annotated[int, Field(gt=0, le=2**50)] | None = None
    """Minimum length of a document, in characters."""
    max_characters: Annotated[int, Field(gt=0, le=2**50)] | None = None
    """Maximum length of a document, in characters."""
    expression: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """Python expression of `text` that is true for documents to keep: `text.count("\\n") > 3`. It
    may use `re`, `len`, `min`, `max`, `sum`, `any`, `all`, `sorted`, `set`, `abs`, `round`, `int`,
    `float` and `str`."""
    function: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Entry point in the group `elastrata.filters` of an installed package: a deterministic
    function that returns whether to keep a document's text."""
    sources: tuple[str, ...] = ()
    """Names of the sources to filter. Default: all."""

    @field_validator("expression")
    @classmethod
    def _check_syntax(cls, value: str | None) -> str | None:
        if value is not None:
            _check_expression(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        least, most = self.min_characters, self.max_characters
        if all(condition is None for condition in (least, most, self.expression, self.function)):
            raise ValueError("needs min_characters, max_characters, an expression, or a function")
        if self.expression is not None and self.function is not None:
            raise ValueError("needs either an expression or a function, in filters of their own")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_characters: {least}: expected at most max_characters ({most})")
        return self


def _check_expression(source: str) -> None:
    """Check that a text is an expression of the offered names; raise ValueError if not."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
        compile(tree, "<expression>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Python expression: {error}") from None
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    # Names that comprehensions and lambdas define.
    own_names = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own_names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    known_names = {"text", *_OFFERED, *own_names}
    for node in names:
        if node.id not in known_names:
            raise ValueError(f"unknown name {node.id!r}{suggest_nearest(node.id, known_names)}")
    for inside in ast.walk(tree):
        # Attributes such as `__class__` lead out of the restricted namespace.
        if isinstance(inside, ast.Attribute) and inside.attr.startswith("_"):
            raise ValueError(f"{inside.attr}: names that begin with _ are not offered")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of a filter for a document that does not pass."""

    reason: str
    """Reason under which the document is counted."""
    problem: str = ""
    """Error message if the filter failed."""


class Filters:
    """Filters of a source.

    Args:
        configs: all filters of the preparation.
        source: name of the source.

    Raises:
        UserError: a function is not installed, or cannot be imported.
    """

    def __init__(self, configs: Sequence[FilterConfig], source: str) -> None:
        self._tests = [
            (number, test)
            for number, config in enumerate(configs)
            if not config.sources or source in config.sources
            for test in _make_tests(number, config)
        ]

    def __call__(self, text: str) -> Verdict | None:
        """Return the verdict of the first filter that rejects a document; None if it is kept."""
        for number, (reason, passes) in self._tests:
            try:
                if not passes(text):
                    return Verdict(reason=reason)
            # Filters are user code.
            except Exception as error:
                message = escape_unprintable(f"{type(error).__name__}: {error}")
                return Verdict(reason="filter failed", problem=f"filters.{number}: {message}")
        return None


def check_filters(configs: Sequence[FilterConfig]) -> None:
    """Check that all functions are installed and can be imported.

    Raises:
        UserError: one line for each function that cannot be used.
    """
    problems: list[str] = []
    for number, config in enumerate(configs):
        try:
            deque(_make_tests(number, config), maxlen=0)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


_Test = tuple[str, Callable[[str], Any]]


def _make_tests(number: int, config: FilterConfig) -> Iterator[_Test]:
    """Yield the conditions of a filter, each with the reason for which it rejects documents."""
    least, most = config.min_characters, config.max_characters
    if least is not None:
        yield config.name or f"shorter than {least:,} characters", lambda text: len(text) >= least
    if most is not None:
        yield config.name or f"longer than {most:,} characters", lambda text: len(text) <= most
    if config.expression is not None:
        shown = " ".join(config.expression.split())
        shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."
        yield config.name or f"not {shown}", _compile(config.expression)
    if config.function is not None:
        yield config.name or f"not {config.function}", _load_function(number, config.function)


@cache
def _compile(source: str) -> Callable[[str], Any]:
    code = compile(source.strip(), "<expression>", "eval")
    # Names inside a comprehension are looked up as globals, so `text` must be one; a new dictionary
    # for each call keeps calls independent.
    return lambda text: eval(code, {"__builtins__": {}, **_OFFERED, "text": text})


def _load_function(number: int, name: str) -> Callable[[str], Any]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    key = f"filters.{number}.function: {name}"
    if name not in found:
        installed = ", ".join(sorted(found)) or "none is"
        raise UserError(
            f"{key}: no installed package has such an entry point in {ENTRY_POINTS}; installed: "
            f"{installed}{suggest_nearest(name, found)}"
        )
    try:
        function = found[name].load()
    # An import runs any code.
    except Exception as error:
        raise UserError(f"{key}: cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(function):
        raise UserError(f"{key}: {found[name].value}: expected a function")
    return function  # type: ignore[no-any-return]
