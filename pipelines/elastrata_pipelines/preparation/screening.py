"""Screening: selects the documents of a corpus that are kept, before any of them is tokenised.

Filters judge every document alone. Duplicates need the whole corpus: its portions are read once in
advance, and give the driver a hash or signature of each document that passes the filters.
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
    compute_signatures,
    find_duplicates,
    find_near_duplicates,
    hash_text,
)
from elastrata_pipelines.preparation.documents import Document, draw_held_out, read_documents
from elastrata_pipelines.preparation.filters import FilterConfig, Filters
from elastrata_pipelines.preparation.portions import NumberedPortion, Place, Repeats
from elastrata_pipelines.preparation.provenance import (
    SIDECAR,
    UNREADABLE,
    count_reasons,
    sum_counts,
)

TRAINING, HELD_OUT = 0, 1
_REASONS = ("", DUPLICATE, NEAR_DUPLICATE)
"""Reasons by their number in `Repeats`."""


@dataclass
class FilteredDocuments:
    """Documents of a portion that pass the filters."""

    documents: list[Document] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of other documents, by reason."""
    problems: list[str] = field(default_factory=list)
    """One line for each document on which a filter failed."""


def filter_documents(
    config: PrepareConfig, source: str, documents: Sequence[Document]
) -> FilteredDocuments:
    """Apply the filters to documents.

    Args:
        config: configuration of the preparation.
        source: name of the documents' source.
        documents: documents of a portion.
    """
    apply_filters, result = _make_filters(config.filters, source), FilteredDocuments()
    for document in documents:
        verdict = apply_filters(document.text)
        if verdict is None:
            result.documents.append(document)
        elif verdict.problem:
            result.problems.append(f"{document.file}:{document.line + 1}: {verdict.problem}")
        else:
            result.left_out[verdict.reason] += 1
    return result


# One per process: loading functions and compiling expressions takes time.
@cache
def _make_filters(configs: tuple[FilterConfig, ...], source: str) -> Filters:
    return Filters(configs, source)


@dataclass(frozen=True, kw_only=True)
class DocumentFingerprints:
    """Hashes and signatures that identify the documents of a portion."""

    hashes: U64
    """Hashes of the normalised texts, shape [documents]."""
    signatures: Signatures | None
    """Signatures for near duplicates, shape [documents, permutations]; None if these are kept."""


def compute_fingerprints(
    config: DeduplicationConfig, documents: Sequence[Document]
) -> DocumentFingerprints:
    """Return the hashes and signatures of documents that passed the filters.

    Raises:
        UserError: the library for near duplicates is not installed.
    """
    texts = [document.text for document in documents]
    return DocumentFingerprints(
        hashes=np.fromiter(map(hash_text, texts), np.uint64, len(texts)),
        signatures=compute_signatures(texts, config.words) if config.method == "near" else None,
    )


def mark_repeats(
    config: DeduplicationConfig, found: Mapping[Place, DocumentFingerprints]
) -> dict[Place, Repeats]:
    """Return the marks of repeated documents for each portion.

    Args:
        config: criteria for equal documents.
        found: hashes and signatures of all portions, in the order of the corpus.
    """
    parts = list(found.values())
    if not parts:
        return {}
    marks = find_duplicates(np.concatenate([part.hashes for part in parts])).astype(np.uint8)
    sketches = [part.signatures for part in parts if part.signatures is not None]
    if sketches:
        left = np.flatnonzero(marks == 0)
        # Exact duplicates are found already, and near ones are compared with kept documents only.
        near = find_near_duplicates(np.concatenate(sketches)[left], config.similarity)
        marks[left[near]] = _REASONS.index(NEAR_DUPLICATE)
    ends = np.cumsum([len(part.hashes) for part in parts])[:-1]
    return dict(zip(found, np.split(marks, ends), strict=True))


def remove_repeats(
    documents: Sequence[Document], marks: Repeats
) -> tuple[list[Document], Counter[str]]:
    """Return the documents that are kept, and the number of others by reason.

    Raises:
        UserError: the text changed after its documents were compared.
    """
    # Marks belong to documents by position only.
    if len(documents) != len(marks):
        raise UserError("sources: the text changed while it was prepared; prepare it again")
    kept_documents = [one for one, mark in zip(documents, marks.tolist(), strict=True) if not mark]
    return kept_documents, Counter(_REASONS[mark] for mark in marks[marks > 0].tolist())


@dataclass(frozen=True, kw_only=True)
class Split:
    """Documents of a portion, divided into training and held-out ones."""

    documents: tuple[list[Document], list[Document]]
    problems: tuple[str, ...]
    """Problems that end the preparation."""
    skipped: dict[str, int]
    """Skipped documents, by reason."""
    least_draw: float
    """Smallest `draw_held_out` of the training documents; 1 without training documents."""


@dataclass(frozen=True, kw_only=True)
class ScreenedDocuments:
    """Documents of a portion that are kept."""

    documents: list[Document]
    problems: tuple[str, ...]
    """Problems that end the preparation."""
    skipped: dict[str, int]
    """Skipped documents, by reason."""


def screen_portion(config: PrepareConfig, numbered: NumberedPortion) -> ScreenedDocuments:
    """Read a portion, and select the documents that are kept."""
    source = config.all_sources[numbered.source]
    read = read_documents(numbered.portion, source, max_document_bytes=config.max_document_bytes)
    found = filter_documents(config, str(source.name), read.documents)
    documents, left_out = found.documents, found.left_out
    if numbered.repeats is not None:
        documents, repeated = remove_repeats(documents, numbered.repeats)
        left_out += repeated
    bad = [*read.problems, *found.problems]
    if numbered.portion.sidecars:
        left_out[SIDECAR] += numbered.portion.sidecars
    if config.bad_documents == "fail":
        return ScreenedDocuments(
            documents=documents, problems=(*read.fatal, *bad), skipped=dict(left_out)
        )
    files = {UNREADABLE: count} if (count := numbered.portion.left_out) else {}
    # Files are counted apart from their documents, which are unknown.
    skipped = sum_counts([count_reasons(bad), files, left_out])
    return ScreenedDocuments(documents=documents, problems=read.fatal, skipped=skipped)


def split_portion(config: PrepareConfig, numbered: NumberedPortion) -> Split:
    """Read a portion, select documents, and divide them into training and held-out ones."""
    kept_part = screen_portion(config, numbered)
    parts: tuple[list[Document], list[Document]] = ([], [])
    fraction, least = config.held_out_fraction, 1.0
    for document in kept_part.documents:
        draw = draw_held_out(document) if fraction else 1.0
        # Sources after the training ones are held out completely.
        is_held_out = draw < fraction or numbered.source >= len(config.sources)
        parts[HELD_OUT if is_held_out else TRAINING].append(document)
        least = least if is_held_out else min(least, draw)
    return Split(
        documents=parts,
        problems=kept_part.problems,
        skipped=kept_part.skipped,
        least_draw=least,
    )


@dataclass(frozen=True)
class FingerprintedPortion:
    """Hashes and signatures of a portion's documents, with its place in the corpus."""

    place: Place
    bytes: int
    prints: DocumentFingerprints
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class FingerprintWork:
    """Task that computes the hashes and signatures of a portion's documents."""

    config: PrepareConfig
    deduplication: DeduplicationConfig

    def __call__(self, numbered: NumberedPortion) -> FingerprintedPortion:
        """Return the hashes and signatures of the documents that pass the filters."""
        kept_part = screen_portion(self.config, numbered)
        return FingerprintedPortion(
            place=numbered.place,
            bytes=numbered.portion.bytes,
            prints=compute_fingerprints(self.deduplication, kept_part.documents),
            problems=kept_part.problems,
        )
