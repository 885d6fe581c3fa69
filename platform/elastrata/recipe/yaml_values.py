"""YAML as plain values, with limits on bytes, number of values and depth, and one-line errors."""

# Aliases and merges count each time they are used, while the file is composed. A file of a few
# lines that expands to a billion values is therefore rejected before it is expanded.

from __future__ import annotations

import pickle
import re
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml

from elastrata_pipelines.checked_json import describe_error, read_bytes
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

MOST_BYTES = 2**20
"""Largest size of a file. The largest recipe that ships has 2,000 bytes."""
MOST_VALUES = 50_000
"""Largest number of values in a file: keys, their values and list items."""
MOST_DEPTH = 64
"""Deepest nesting of sections and lists."""
# int() takes quadratic time for long texts.
_MOST_DIGITS = 100
_LARGEST = 2**64
_TAG = "tag:yaml.org,2002:"
# Control characters and lone surrogates, which could be read from escapes but not written again.
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def parse_yaml(text: str, where: str, *, count_lines: bool = True) -> Any:
    """Return the value of a document with YAML 1.2 scalars: `3e-4` is a number, `yes` is text.

    Args:
        text: YAML text.
        where: name of the text in errors, for example the file.
        count_lines: whether errors contain the line number.

    Raises:
        UserError: the text is not YAML, exceeds a limit, repeats a key, or contains values other
            than text, numbers, truth values, null, lists and sections.
    """
    documents = _load_documents(_Yaml12Loader, text, where, count_lines)
    if len(documents) > 1:
        raise UserError(f"{where}: not valid YAML: expected a single document")
    return documents[0] if documents else None


def parse_documents(text: str, where: str) -> list[Any]:
    """Return the values of all documents with YAML 1.1 scalars, as used by Ray and Kubernetes.

    Raises:
        UserError: as in `parse_yaml`.
    """
    return _load_documents(_Yaml11Loader, text, where, True)


def read_text(path: Path, shown: str, most: int = MOST_BYTES) -> str:
    """Return the text of a file.

    Args:
        path: file to read.
        shown: name of the file in errors.
        most: largest allowed number of bytes.

    Raises:
        UserError: the file is not a regular file of UTF-8 text, is too large, or cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "folder" if stat.S_ISDIR(status.st_mode) else "device, pipe or socket"
            raise UserError(f"{shown}: a {kind}, expected a file")
        if status.st_size > most:
            raise UserError(f"{shown}: {status.st_size:,} bytes, expected at most {most:,}")
        return _decode(path.read_bytes(), shown)
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise UserError(f"{shown}: cannot be read ({describe_error(error)})") from None


def read_stored(storage: Storage, *parts: str) -> Any:
    """Return the values of a file that this or an earlier version wrote with `dump_yaml`.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: the file is damaged.
    """
    where = storage.uri(*parts)
    # Earlier versions wrote YAML 1.1, which the output of `dump_yaml` is compatible with.
    documents = parse_documents(_decode(read_bytes(storage, *parts, most=MOST_BYTES), where), where)
    return documents[0] if documents else None


def dump_yaml(values: Any) -> str:
    """Return values as YAML with the same meaning in versions 1.1 and 1.2."""
    return yaml.dump(values, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True)


def _decode(data: bytes, shown: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{shown}: not UTF-8 text") from None


class _RejectedYamlError(yaml.MarkedYAMLError):
    """Valid YAML that exceeds a limit or uses an unsupported feature."""


class _BoundedLoader(yaml.SafeLoader):
    """Loader that enforces limits and builds values that share no parts."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = self._deepest = 0
        self._anchored: dict[str, tuple[int, int]] = {}
        """By anchor, the number of values and the depth of its node."""

    def documents(self) -> list[Any]:
        """Return the values of all documents."""
        values = []
        while self.check_node():
            if (node := self.get_node()) is not None:
                values.append(self._value(node))
        return values

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors:
                self._count(*self._measure(event), event)
            return super().compose_node(parent, index)
        before, outer = self._values, self._deepest
        # An anchor has no size until its node is complete: an alias inside would contain itself.
        self._anchored.pop(event.anchor, None)
        self._count(1, 1, event)
        self._depth += 1
        self._deepest = self._depth
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._anchored[event.anchor] = self._values - before, self._deepest - self._depth
        self._deepest = max(outer, self._deepest)
        return node

    def _measure(self, alias: Any) -> tuple[int, int]:
        if alias.anchor not in self._anchored:
            raise _RejectedYamlError(
                problem=f"the anchor '{alias.anchor}' contains itself",
                problem_mark=alias.start_mark,
            )
        return self._anchored[alias.anchor]

    def _count(self, values: int, depth: int, event: Any) -> None:
        self._values += values
        self._deepest = max(self._deepest, self._depth + depth)
        for number, most, what in (
            (self._values, MOST_VALUES, "values, those of anchors as often as they are used"),
            (self._depth + depth, MOST_DEPTH, "sections and lists inside one another"),
        ):
            if number > most:
                raise _RejectedYamlError(
                    problem=f"more than {most:,} {what}", problem_mark=event.start_mark
                )

    def _value(self, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self._value(item) for item in node.value]
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node)
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node)
        tag = str(node.tag).replace(_TAG, "!!")
        raise _RejectedYamlError(
            problem=f"the tag '{tag}': expected none", problem_mark=node.start_mark
        )

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if odd := _UNWRITABLE.search(node.value):
            raise _RejectedYamlError(
                problem=f"a text with the character {odd.group()!r}", problem_mark=node.start_mark
            )
        is_number = node.tag in (f"{_TAG}int", f"{_TAG}float")
        try:
            if is_number and len(node.value) > _MOST_DIGITS:
                raise ValueError
            value = _SCALARS[node.tag](self, node)
            if isinstance(value, int) and abs(value) >= _LARGEST:
                raise ValueError
        except (ValueError, KeyError, IndexError):
            kind = "a number of at most 64 bits" if is_number else str(node.tag).replace(_TAG, "!!")
            raise _RejectedYamlError(
                problem=f"'{node.value[:_MOST_DIGITS]}': expected {kind}",
                problem_mark=node.start_mark,
            ) from None
        return value

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """Return the section of a node. Keys are text as written, and override those of merges."""
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                # YAML's merge type: the first of several sections with a key has precedence.
                merged = {**self._merges(value), **merged}
                continue
            name = self._key(key)
            if name in own:
                raise yaml.MarkedYAMLError(
                    problem=f"the key '{name}' is given twice", problem_mark=key.start_mark
                )
            own[name] = self._value(value)
        return {**merged, **own}

    def _merges(self, node: yaml.Node) -> dict[str, Any]:
        sections = node.value if isinstance(node, yaml.SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for section in sections:
            if not isinstance(section, yaml.MappingNode):
                raise yaml.MarkedYAMLError(
                    problem="<<: expected a section, or a list of sections",
                    problem_mark=section.start_mark,
                )
            merged = {**self._mapping(section), **merged}
        return merged

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key is not text", problem_mark=node.start_mark)
        self._value(node)  # applies the checks of scalars; the key stays text
        return str(node.value)


_SCALARS: dict[str, Callable[[_BoundedLoader, yaml.ScalarNode], Any]] = {
    f"{_TAG}null": lambda loader, node: None,
    f"{_TAG}bool": lambda loader, node: loader.construct_yaml_bool(node),
    f"{_TAG}int": lambda loader, node: loader.construct_yaml_int(node),
    f"{_TAG}float": lambda loader, node: loader.construct_yaml_float(node),
    f"{_TAG}str": lambda loader, node: node.value,
}


# YAML 1.1, PyYAML's default, reads `3e-4` as text and `1:30` as 90.
class _Yaml12Loader(_BoundedLoader):
    """Loader with YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own shape


class _Yaml11Loader(_BoundedLoader):
    """Loader with YAML 1.1 scalars, except that timestamps stay text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own shape
        first: [(tag, pattern) for tag, pattern in resolvers if tag in (*_SCALARS, f"{_TAG}merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _QuotingDumper(yaml.SafeDumper):
    """Dumper that quotes every text that either version of YAML would read as another type."""


for _name, _pattern, _first in (
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
    for _kind in (_Yaml12Loader, _QuotingDumper):
        _kind.add_implicit_resolver(f"{_TAG}{_name}", re.compile(rf"^(?:{_pattern})$"), _first)


# Parsing a recipe takes 20 ms, and a command may read a run's recipe and its bases several times.
# The cache holds bytes because callers modify the values.
@lru_cache(maxsize=32)
def _pickled_documents(kind: type[_BoundedLoader], text: str) -> bytes:
    """Return the pickled values of all documents, cached."""
    return pickle.dumps(kind(text).documents())


def _load_documents(
    kind: type[_BoundedLoader], text: str, where: str, count_lines: bool
) -> list[Any]:
    try:
        values: list[Any] = pickle.loads(_pickled_documents(cast(Any, kind), text))
        return values
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark and count_lines else ""
        prefix = "" if isinstance(error, _RejectedYamlError) else "not valid YAML: "
        raise UserError(f"{where}{line}: {prefix}{error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = f":{text.count(chr(10), 0, error.position) + 1}" if count_lines else ""
        raise UserError(
            f"{where}{line}: not valid YAML: the character {chr(error.character)!r}"
        ) from None
    # ValueError and OverflowError: escapes such as "\UFFFFFFFF" that are not characters.
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: not valid YAML: {describe_error(error)}") from None
