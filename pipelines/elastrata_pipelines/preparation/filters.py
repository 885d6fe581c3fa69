"""Filters: which documents stay, by length, by an expression, or by a function of one's own."""

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
from elastrata_pipelines.errors import UserError, in_one_line, nearest

ENTRY_POINTS = "elastrata.filters"
"""Group of the entry points of functions from a text to whether it stays."""
_OFFERED: dict[str, Any] = {
    "abs": abs, "all": all, "any": any, "float": float, "int": int, "len": len, "max": max,
    "min": min, "re": re, "round": round, "set": set, "sorted": sorted, "str": str, "sum": sum,
}  # fmt: skip
"""What an expression may use beside `text`."""
_SHOWN_CHARACTERS = 60


class FilterConfig(ConfigPart):
    """Which documents stay: all that it says must hold."""

    either: ClassVar = (("expression",), ("function",))

    name: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """What is left out is counted by it. Default: what the filter asks for."""
    min_characters: Annotated[int, Field(gt=0, le=2**50)] | None = None
    """Shorter documents are left out."""
    max_characters: Annotated[int, Field(gt=0, le=2**50)] | None = None
    """Longer documents are left out."""
    expression: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A Python expression of `text`, such as `text.count("\\n") > 3`, that is true of documents
    which stay. It may use `re`, `len`, `min`, `max`, `sum`, `any`, `all`, `sorted`, `set`, `abs`,
    `round`, `int`, `float` and `str`."""
    function: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """Name of an entry point in the group `elastrata.filters` of an installed package: a function
    from a document's text to whether it stays, the same every time it is asked."""
    sources: tuple[str, ...] = ()
    """Names of the sources that it is for. Default: all."""

    @field_validator("expression")
    @classmethod
    def _parses(cls, value: str | None) -> str | None:
        if value is not None:
            _check_expression(value)
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        least, most = self.min_characters, self.max_characters
        if all(asked is None for asked in (least, most, self.expression, self.function)):
            raise ValueError("needs min_characters, max_characters, an expression, or a function")
        if self.expression is not None and self.function is not None:
            raise ValueError("needs either an expression or a function, in filters of their own")
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_characters: {least}: expected at most max_characters ({most})")
        return self


def _check_expression(source: str) -> None:
    """Raises ValueError where it is no expression, or uses what is not offered."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
        compile(tree, "<expression>", "eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a Python expression: {error}") from None
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    known = {"text", *_OFFERED, *own}
    for node in names:
        if node.id not in known:
            raise ValueError(f"unknown name {node.id!r}{nearest(node.id, known)}")
    for inside in ast.walk(tree):
        if isinstance(inside, ast.Attribute) and inside.attr.startswith("_"):
            raise ValueError(f"{inside.attr}: names that begin with _ are not offered")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a filter says of a document that does not pass."""

    reason: str
    """That it is counted by."""
    problem: str = ""
    """Where the filter could not tell: why."""


class Filters:
    """The filters of a source.

    Args:
        configs: all filters of the preparation.
        source: the source's name.

    Raises:
        UserError: a function is not installed, or cannot be imported.
    """

    def __init__(self, configs: Sequence[FilterConfig], source: str) -> None:
        self._tests = [
            (number, test)
            for number, config in enumerate(configs)
            if not config.sources or source in config.sources
            for test in _tests(number, config)
        ]

    def __call__(self, text: str) -> Verdict | None:
        """The verdict of the first filter that a document does not pass; None: it stays."""
        for number, (reason, passes) in self._tests:
            try:
                if not passes(text):
                    return Verdict(reason=reason)
            except Exception as error:  # a filter may raise whatever it likes
                told = in_one_line(f"{type(error).__name__}: {error}")
                return Verdict(reason="filter failed", problem=f"filters.{number}: {told}")
        return None


def check_filters(configs: Sequence[FilterConfig]) -> None:
    """Raises UserError where a function is not installed, or cannot be imported: a line each."""
    problems: list[str] = []
    for number, config in enumerate(configs):
        try:
            deque(_tests(number, config), maxlen=0)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)


_Test = tuple[str, Callable[[str], Any]]


def _tests(number: int, config: FilterConfig) -> Iterator[_Test]:
    """The parts of a filter, each with the reason that it leaves documents out for."""
    least, most = config.min_characters, config.max_characters
    if least is not None:
        yield config.name or f"shorter than {least:,} characters", lambda text: len(text) >= least
    if most is not None:
        yield config.name or f"longer than {most:,} characters", lambda text: len(text) <= most
    if config.expression is not None:
        shown = " ".join(config.expression.split())
        shown = shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[:_SHOWN_CHARACTERS]}..."
        yield config.name or f"not {shown}", _compiled(config.expression)
    if config.function is not None:
        yield config.name or f"not {config.function}", _loaded(number, config.function)


@cache
def _compiled(source: str) -> Callable[[str], Any]:
    code = compile(source.strip(), "<expression>", "eval")
    # One dictionary for each call: what a comprehension sees are globals.
    return lambda text: eval(code, {"__builtins__": {}, **_OFFERED, "text": text})


def _loaded(number: int, name: str) -> Callable[[str], Any]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    key = f"filters.{number}.function: {name}"
    if name not in found:
        known = ", ".join(sorted(found)) or "none is"
        raise UserError(
            f"{key}: no installed package has such an entry point in {ENTRY_POINTS}; installed: "
            f"{known}{nearest(name, found)}"
        )
    try:
        function = found[name].load()
    except Exception as error:  # an import may raise whatever it likes
        raise UserError(f"{key}: cannot be imported ({type(error).__name__}: {error})") from None
    if not callable(function):
        raise UserError(f"{key}: {found[name].value}: expected a function")
    return function  # type: ignore[no-any-return]
