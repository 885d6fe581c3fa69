"""Deduplication: finds documents that repeat an earlier one, exactly or nearly.

Near duplicates are found by MinHash (Broder, 1997) of word shingles. Signatures are divided into
bands, and documents that agree in a whole band are compared by their complete signatures.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from elastrata_pipelines.configured_text import ConfigPart
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.hashing import U64, combine, text_hash

Signatures = npt.NDArray[np.uint32]
Flags = npt.NDArray[np.bool_]
DUPLICATE, NEAR_DUPLICATE = "duplicate", "near duplicate"
"""Reasons under which documents are counted."""
# With 128 hashes, the standard error of a similarity of 0.8 is 0.035.
PERMUTATIONS = 128
"""Length of a signature."""
# Fixed, so that a corpus always has the same duplicates.
_SEED = 1
_SHINGLES_AT_ONCE = 2**14
_WORD = re.compile(r"\w+")


class DeduplicationConfig(ConfigPart):
    """Removal of documents that duplicate an earlier one."""

    only_with: ClassVar = {
        "similarity": ("method", "near"),
        "words": ("method", "near"),
    }

    method: Literal["exact", "near"] = "exact"
    """exact: remove documents equal to an earlier one except for case, white space and forms of the
    same letter (Unicode's NFKC). near: also those that share most word sequences with an earlier
    one, by MinHash; needs rensa."""
    similarity: Annotated[float, Field(ge=0.5, le=1)] = 0.8
    """near: minimum similarity for removing the later document: word sequences in both as a share
    of those in either; estimated from 128 hashes."""
    words: Annotated[int, Field(gt=0, le=100)] = 5
    """near: words per sequence."""

    @model_validator(mode="after")
    def _only_with_near(self) -> Self:
        for key in self.only_with:
            value = getattr(self, key)
            if self.method != "near" and value != type(self).model_fields[key].default:
                raise ValueError(f"{key}: {value}: only with method: near")
        return self


def normalise(text: str) -> str:
    """Return a text with normalised case, white space and letter forms."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def hash_text(text: str) -> int:
    """Return a 64-bit hash of the normalised text."""
    return text_hash(normalise(text))


def signature_version() -> int:
    """Return the version of the signature algorithm.

    Raises:
        UserError: the library is not installed.
    """
    return int(_load_library().ALGORITHM_VERSION)


def compute_signatures(texts: Sequence[str], words: int) -> Signatures:
    """Return the MinHash signature of each text, shape [texts, PERMUTATIONS].

    Raises:
        UserError: the library is not installed.
    """
    min_hash_class = _load_library()
    found = np.empty((len(texts), PERMUTATIONS), np.uint32)
    for row, text in zip(found, texts, strict=True):
        min_hash = min_hash_class(PERMUTATIONS, _SEED)
        for shingles in _shingles(text, words):
            min_hash.update(shingles)
        row[:] = min_hash.digest()
    return found


def _shingles(text: str, words: int) -> Iterator[list[str]]:
    """Yield all sequences of `words` words in batches; a shorter text is one sequence."""
    found = _WORD.findall(normalise(text)) or [text]
    count = max(1, len(found) - words + 1)
    for first in range(0, count, _SHINGLES_AT_ONCE):
        last = min(count, first + _SHINGLES_AT_ONCE)
        yield [" ".join(found[place : place + words]) for place in range(first, last)]


def _load_library() -> Any:
    try:
        from rensa import RMinHash
    except ImportError:
        raise UserError(
            "deduplication.method: near: rensa is not installed: pip install rensa"
        ) from None
    return RMinHash


def find_duplicates(hashes: U64) -> Flags:
    """Return a flag for each document whose hash is that of an earlier one, shape [documents]."""
    _, first = np.unique(hashes, return_index=True)
    flags = np.ones(len(hashes), bool)
    flags[first] = False
    return flags


def find_near_duplicates(found: Signatures, similarity: float) -> Flags:
    """Return a flag for each document that is similar to an earlier, unflagged one, shape
    [documents].

    Args:
        found: signatures, in the order of the corpus.
        similarity: minimum share of equal hashes in near duplicates.
    """
    keys = _band_keys(found, _rows_per_band(similarity))
    shared = _find_shared_bands(keys)
    # Buckets hold kept documents only, so that a chain of similar documents is not removed
    # completely.
    flags, buckets = np.zeros(len(found), bool), dict[tuple[int, int], list[int]]()
    # Documents without a shared band cannot have a near duplicate.
    for number in np.flatnonzero(shared.any(axis=1)).tolist():
        own_buckets = [
            (band, int(keys[number, band])) for band in np.flatnonzero(shared[number]).tolist()
        ]
        others = sorted({other for place in own_buckets for other in buckets.get(place, ())})
        equal = (found[others] == found[number]).mean(axis=1)
        if (equal >= similarity).any():
            flags[number] = True
        else:
            for place in own_buckets:
                buckets.setdefault(place, []).append(number)
    return flags


def _rows_per_band(similarity: float) -> int:
    """Return the number of rows in a band for which similar documents almost surely share a
    band."""
    # Documents of similarity s agree in a band with probability s^rows, and (rows /
    # PERMUTATIONS)^(1 / rows) is the similarity at which one agreeing band is expected.
    for rows in (16, 8, 4, 2):
        if (rows / PERMUTATIONS) ** (1 / rows) <= similarity - 0.05:
            return rows
    return 1


def _band_keys(found: Signatures, rows: int) -> U64:
    """Return a hash of every band of every document, shape [documents, bands]."""
    bands = found.reshape(len(found), PERMUTATIONS // rows, rows).astype(np.uint64)
    keys = np.zeros(bands.shape[:2], np.uint64)
    for row in range(rows):
        keys = combine(keys, bands[:, :, row])
    return keys


def _find_shared_bands(keys: U64) -> Flags:
    """Return a flag for each band of each document that another document has, too."""
    shared = np.zeros(keys.shape, bool)
    for band in range(keys.shape[1]):
        _, inverse, counts = np.unique(keys[:, band], return_inverse=True, return_counts=True)
        shared[:, band] = counts[inverse] > 1
    return shared
