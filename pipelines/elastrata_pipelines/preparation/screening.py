"""Screening: which documents of a corpus stay, before any of them is tokenised.

The filters of a document ask nothing of the others. What has been said by an earlier document only
the whole corpus tells: its portions are read once for that alone, and give the driver a hash, or a
signature, of each document that passes the filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.hashing import U64
from elastrata_pipelines.preparation.config import PrepareConfig
from elastrata_pipelines.preparation.deduplication import (
    DUPLICATE,
    NEAR_DUPLICATE,
    DeduplicationConfig,
    Signatures,
    duplicates,
    near_duplicates,
    normalised_hash,
    signatures,
)
from elastrata_pipelines.preparation.documents import Document, held_out_draw, read_documents
from elastrata_pipelines.preparation.filters import FilterConfig, Filters
from elastrata_pipelines.preparation.portions import NumberedPortion, Place, Repeats
from elastrata_pipelines.preparation.provenance import UNREADABLE, count_reasons, total

TRAINING, HELD_OUT = 0, 1
_REASONS = ("", DUPLICATE, NEAR_DUPLICATE)
"""By number in `Repeats`."""


@dataclass
class Passed:
    """The documents of a portion that pass the filters."""

    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Others, by reason."""
    problems: list[str] = field(default_factory=list)
    """A line for each document that a filter could not tell of."""


def passed(config: PrepareConfig, source: str, documents: Sequence[Document]) -> Passed:
    """Asks the filters.

    Args:
        config: of the preparation.
        source: the name of theirs.
        documents: of a portion.
    """
    ask, found = _filters(config.filters, source), Passed()
    for document in documents:
        verdict = ask(document.text)
        if verdict is None:
            found.documents.append(document)
        elif verdict.problem:
            found.problems.append(f"{document.file}:{document.line + 1}: {verdict.problem}")
        else:
            found.left_out[verdict.reason] += 1
    return found


@cache
def _filters(configs: tuple[FilterConfig, ...], source: str) -> Filters:
    return Filters(configs, source)


@dataclass(frozen=True, kw_only=True)
class Prints:
    """What tells the documents of a portion from others."""

    hashes: U64
    """Of the normalised texts, shape [documents]."""
    signatures: Signatures | None
    """For near duplicates, shape [documents, permutations]; None: these stay."""


def prints(config: DeduplicationConfig, documents: Sequence[Document]) -> Prints:
    """Those of documents that passed the filters.

    Raises:
        UserError: the library for near duplicates is not installed.
    """
    texts = [document.text for document in documents]
    return Prints(
        hashes=np.fromiter(map(normalised_hash, texts), np.uint64, len(texts)),
        signatures=signatures(texts, config.words) if config.method == "near" else None,
    )


def repeats(config: DeduplicationConfig, found: Mapping[Place, Prints]) -> dict[Place, Repeats]:
    """Which documents have been there before, portion by portion.

    Args:
        config: what counts as the same.
        found: of all portions, in the order of the corpus.
    """
    parts = list(found.values())
    if not parts:
        return {}
    marks = duplicates(np.concatenate([part.hashes for part in parts])).astype(np.uint8)
    sketches = [part.signatures for part in parts if part.signatures is not None]
    if sketches:
        left = np.flatnonzero(marks == 0)
        near = near_duplicates(np.concatenate(sketches)[left], config.similarity)
        marks[left[near]] = _REASONS.index(NEAR_DUPLICATE)
    ends = np.cumsum([len(part.hashes) for part in parts])[:-1]
    return dict(zip(found, np.split(marks, ends), strict=True))


def without_repeats(
    documents: Sequence[Document], marks: Repeats
) -> tuple[list[Document], Counter[str]]:
    """The documents that stay, and how many do not, by reason.

    Raises:
        UserError: the text is not what it was when it was looked at.
    """
    if len(documents) != len(marks):
        raise UserError("sources: the text changed while it was prepared; prepare it again")
    kept = [one for one, mark in zip(documents, marks.tolist(), strict=True) if not mark]
    return kept, Counter(_REASONS[mark] for mark in marks[marks > 0].tolist())


@dataclass(frozen=True, kw_only=True)
class Split:
    """The documents of a portion, for training and held out."""

    documents: tuple[list[Document], list[Document]]
    problems: tuple[str, ...]
    """They end the preparation."""
    skipped: dict[str, int]
    """Documents left out, by reason."""
    least_draw: float
    """The smallest `held_out_draw` of those for training; 1 without any."""


@dataclass(frozen=True, kw_only=True)
class Screened:
    """The documents of a portion that stay."""

    documents: list[Document]
    problems: tuple[str, ...]
    """They end the preparation."""
    skipped: dict[str, int]
    """Documents left out, by reason."""


def screened(config: PrepareConfig, numbered: NumberedPortion) -> Screened:
    """Reads a portion, and leaves out what is not to stay."""
    source = config.all_sources[numbered.source]
    read = read_documents(numbered.portion, source, max_document_bytes=config.max_document_bytes)
    found = passed(config, str(source.name), read.documents)
    documents, left_out = found.documents, found.left_out
    if numbered.repeats is not None:
        documents, repeated = without_repeats(documents, numbered.repeats)
        left_out += repeated
    bad = [*read.problems, *found.problems]
    if config.bad_documents == "fail":
        return Screened(documents=documents, problems=(*read.fatal, *bad), skipped=dict(left_out))
    files = {UNREADABLE: count} if (count := numbered.portion.left_out) else {}
    skipped = total([count_reasons(bad), files, left_out])
    return Screened(documents=documents, problems=read.fatal, skipped=skipped)


def split(config: PrepareConfig, numbered: NumberedPortion) -> Split:
    """Reads a portion: what stays of it, for training and held out."""
    stay = screened(config, numbered)
    parts: tuple[list[Document], list[Document]] = ([], [])
    fraction, least = config.held_out_fraction, 1.0
    for document in stay.documents:
        draw = held_out_draw(document) if fraction else 1.0
        is_held_out = draw < fraction or numbered.source >= len(config.sources)
        parts[HELD_OUT if is_held_out else TRAINING].append(document)
        least = least if is_held_out else min(least, draw)
    return Split(
        documents=parts,
        problems=stay.problems,
        skipped=stay.skipped,
        least_draw=least,
    )


@dataclass(frozen=True)
class Printed:
    """What tells the documents of a portion from others."""

    place: Place
    bytes: int
    prints: Prints
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrintWork:
    """Finds what tells the documents of a portion from others."""

    config: PrepareConfig
    deduplication: DeduplicationConfig

    def __call__(self, numbered: NumberedPortion) -> Printed:
        """Those of its documents that pass the filters."""
        stay = screened(self.config, numbered)
        return Printed(
            place=numbered.place,
            bytes=numbered.portion.bytes,
            prints=prints(self.deduplication, stay.documents),
            problems=stay.problems,
        )
