"""What a data set was made from, kept beside its manifest, and the documents that were left out."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from elastrata_pipelines.checked_json import Record, read_record
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from elastrata_pipelines.preparation.work import Tokenized, TrainingText


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


_REASONS = {
    "filter failed": r": filters\.\d+: ",
    "not UTF-8": "not UTF-8",
    "not JSON": "not valid JSON|nested too deeply|a JSON object was expected",
    "no text field": "no field ",
    "text field twice": "is there twice",
    "null": " is null",
    "not text": ", not text",
    "half of a surrogate pair": "surrogate pair",
}
"""The words of a problem by which each reason is known."""
OTHER = "other"
NOT_A_FILE = "not a file"
"""Pipes, devices and broken links in folders."""
UNREADABLE = "unreadable file"
"""Files that are damaged, cut off, not to be opened, or without the column; counted as one each."""


def count_reasons(problems: Iterable[str]) -> dict[str, int]:
    """How many of the problems of documents have each reason."""
    return dict(Counter(map(_reason, problems)))


def _reason(problem: str) -> str:
    for reason, words in _REASONS.items():
        if re.search(words, problem):
            return reason
    return OTHER


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of counts by reason, the commonest reason first."""
    summed: Counter[str] = Counter()
    for count in counts:
        summed.update(count)
    return dict(sorted(summed.items(), key=lambda item: (-item[1], item[0])))


def in_words(counts: Mapping[str, int]) -> str:
    """Counts by reason for people."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def barren_sources(
    config: PrepareConfig, results: Sequence[Tokenized | TrainingText]
) -> Iterator[str]:
    """One line for each source all of whose portions are empty."""
    for number, source in enumerate(config.all_sources):
        portions = [portion for portion in results if portion.source == number]
        if not all(portion.is_empty for portion in portions):
            continue
        of_training = number < len(config.sources)
        key = f"sources.{number}" if of_training else f"held_out.{number - len(config.sources)}"
        documents = sum(sum(portion.documents) for portion in portions)
        skipped = total(portion.skipped for portion in portions)
        counts = [f"{documents:,} documents"]
        counts += [f"skipped {in_words(skipped)}"] if skipped else []
        if documents:
            counts.append(f"no sample of at least min_tokens ({config.min_tokens}) tokens")
        if documents and source.weight < 1:
            counts.append(f"weight {source.weight:g}")
        yield f"{key}: {source.name}: nothing is left of it: {', '.join(counts)}"
