"""Skipped documents, counted by reason, and sources of which nothing is left."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from elastrata_pipelines.preparation.config import PrepareConfig

if TYPE_CHECKING:
    from elastrata_pipelines.preparation.work import Tokenized, TrainingText

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
