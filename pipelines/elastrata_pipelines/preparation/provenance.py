"""Provenance: records the origin of a data set, and counts skipped documents by reason."""

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
    from elastrata_pipelines.preparation.work import TokenizedPortion, TrainingText
from elastrata_pipelines.errors import pluralize

PROVENANCE = "preparation.json"
_SHOWN = 12
# Left out if empty, so that the bytes are those of earlier versions, which did not have the field.
_SWITCHED_OFF = {"switched_off"}


class FilesOfSource(Record):
    """Files of a source."""

    files: int
    bytes: int
    sha256: str
    """Digest of their names, sizes and contents."""


class Provenance(Record):
    """Origin of a data set, beyond the content of its manifest."""

    configuration: dict[str, Any]
    """Configuration of the preparation, without paths, and with the fingerprint of a loaded
    tokenizer."""
    files: dict[str, FilesOfSource]
    """Files of each source, by name."""
    unknown_tokens: dict[str, int] | None = None
    """Unknown tokens of each source, by name; None if the tokenizer knows all text."""

    switched_off: tuple[str, ...] = ()
    """Settings of the loaded tokenizer that made ids random, such as `dropout 0.1`."""

    def to_json(self) -> bytes:
        """Return the content of the file in the data set's folder."""
        values = self.model_dump(mode="json", exclude=None if self.switched_off else _SWITCHED_OFF)
        return json.dumps(values, indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, storage: Storage) -> Self | None:
        """Return the provenance of a data set; None if an earlier version made it, which stored
        none.

        Raises:
            UserError: the file is incomplete or altered.
        """
        try:
            return read_record(cls, storage, PROVENANCE)
        except FileNotFoundError:
            return None

    def differences(self, asked: Provenance) -> list[str]:
        """Return one line, with both values, for each key in which the other provenance differs."""
        lines = list(_compare(self.configuration, asked.configuration))
        for name in {**self.files, **asked.files}:
            existing, other = self.files.get(name), asked.files.get(name)
            # Added and removed sources are differences of the configuration already.
            if existing and other and existing != other:
                lines.append(
                    f"files of {name}: {_describe_files(existing)}, now {_describe_files(other)}"
                )
        more = len(lines) - _SHOWN
        return [*lines[:_SHOWN], f"and {more} more differences"] if more > 0 else lines


def _describe_files(files: FilesOfSource) -> str:
    return f"{files.files:,} of {pluralize(files.bytes, 'byte')} ({files.sha256[:8]})"


def _compare(existing: dict[str, Any], requested: dict[str, Any]) -> Iterator[str]:
    old, new = dict(_flatten("", existing)), dict(_flatten("", requested))
    for key in sorted({**old, **new}):
        before, now = (json.dumps(values[key]) if key in values else "not there"
                       for values in (old, new))  # fmt: skip
        if before != now:
            yield f"{key}: {before}, now {now}"


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values with dotted keys."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inside in items:
            yield from _flatten(f"{prefix}.{key}" if prefix else str(key), inside)
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
"""Regular expressions by which the reason of a problem is recognised."""
OTHER = "other"
NOT_A_FILE = "not a file"
"""Reason for pipes, devices and broken links in folders."""
SIDECAR = "file beside the data"
"""Reason for hidden files, those of Spark and the hub, and the like, see `is_sidecar`."""
UNREADABLE = "unreadable file"
"""Reason for files that are damaged, truncated, inaccessible, or without the column; each counts
once."""


def count_reasons(problems: Iterable[str]) -> dict[str, int]:
    """Return the number of problems of documents by reason."""
    return dict(Counter(map(_reason, problems)))


def _reason(problem: str) -> str:
    for reason, words in _REASONS.items():
        if re.search(words, problem):
            return reason
    return OTHER


def sum_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sum of counts by reason, most frequent first."""
    summed: Counter[str] = Counter()
    for count in counts:
        summed.update(count)
    return dict(sorted(summed.items(), key=lambda item: (-item[1], item[0])))


def format_counts(counts: Mapping[str, int]) -> str:
    """Return counts by reason as text."""
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items())


def find_empty_sources(
    config: PrepareConfig, results: Sequence[TokenizedPortion | TrainingText]
) -> Iterator[str]:
    """Yield one line for each source whose portions are all empty."""
    for number, source in enumerate(config.all_sources):
        portions = [portion for portion in results if portion.source == number]
        if not all(portion.is_empty for portion in portions):
            continue
        of_training = number < len(config.sources)
        key = f"sources.{number}" if of_training else f"held_out.{number - len(config.sources)}"
        documents = sum(sum(portion.documents) for portion in portions)
        skipped = sum_counts(portion.skipped for portion in portions)
        counts = [pluralize(documents, "document")]
        counts += [f"skipped {format_counts(skipped)}"] if skipped else []
        if documents:
            counts.append(f"no sample of at least min_tokens ({config.min_tokens}) tokens")
        if documents and source.weight < 1:
            counts.append(f"weight {source.weight:g}")
        yield f"{key}: {source.name}: nothing is left of it: {', '.join(counts)}"
