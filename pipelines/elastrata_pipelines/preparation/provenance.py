"""Provenance: what a data set was made from, kept beside its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Self

from elastrata_pipelines.checked_json import Record, read_record
from elastrata_pipelines.storage import Storage

PROVENANCE = "preparation.json"
_SHOWN = 12
_SWITCHED_OFF = {"switched_off"}  # earlier versions, which had none, write the same bytes


class FilesOfSource(Record):
    """The files of a source."""

    files: int
    bytes: int
    sha256: str
    """A digest of their names, sizes and contents."""


class Provenance(Record):
    """The origin of a data set, as far as its manifest does not say it."""

    configuration: dict[str, Any]
    """The configuration of the preparation, without paths; of a loaded tokenizer its
    fingerprint."""
    files: dict[str, FilesOfSource]
    """By the names of the sources."""
    unknown_tokens: dict[str, int] | None = None
    """By the names of the sources; None where the tokenizer knows all text."""

    switched_off: tuple[str, ...] = ()
    """Settings of the loaded tokenizer that drew ids at random, such as `dropout 0.1`."""

    def to_json(self) -> bytes:
        """The bytes of its file in the folder of a data set."""
        values = self.model_dump(mode="json", exclude=None if self.switched_off else _SWITCHED_OFF)
        return json.dumps(values, indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, storage: Storage) -> Self | None:
        """That of a data set; None where an earlier version made it, which kept none.

        Raises:
            UserError: it is torn or altered.
        """
        try:
            return read_record(cls, storage, PROVENANCE)
        except FileNotFoundError:
            return None

    def differences(self, asked: Provenance) -> list[str]:
        """Keys in which another one differs, with both values, a line each."""
        lines = list(_differences(self.configuration, asked.configuration))
        for name in {**self.files, **asked.files}:
            there, wanted = self.files.get(name), asked.files.get(name)
            if there and wanted and there != wanted:
                lines.append(f"files of {name}: {_in_words(there)}, now {_in_words(wanted)}")
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], f"and {more} more differences"] if more > 0 else lines


def _in_words(files: FilesOfSource) -> str:
    return f"{files.files:,} of {files.bytes:,} bytes ({files.sha256[:8]})"


def _differences(there: dict[str, Any], asked: dict[str, Any]) -> Iterator[str]:
    old, new = dict(_flat("", there)), dict(_flat("", asked))
    for key in sorted({**old, **new}):
        before, now = (json.dumps(values[key]) if key in values else "not there"
                       for values in (old, new))  # fmt: skip
        if before != now:
            yield f"{key}: {before}, now {now}"


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values by dotted keys."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inside in items:
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inside)
    else:
        yield prefix, value
