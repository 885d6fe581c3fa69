"""Sentence pairs give away nothing but their text: no length tells random from true ones."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from elastrata_pipelines.hashing import mix
from elastrata_pipelines.preparation.pairs import PairFrame, make_pairs

FRAME = PairFrame((1,), (2,), (2,))
SENTENCES = {"short": ((1, 7),), "long": ((100, 400),), "mixed": ((1, 7), (1, 7), (20, 200))}
"""Least and most sentences of a document, for each of the kinds that take turns."""
PAIRS = 46_000
CORPORA = pytest.mark.parametrize(
    ("kind", "seq_len"), [("short", 64), ("long", 64), ("mixed", 64), ("mixed", 256)]
)


@lru_cache
def pairs(kind: str, seq_len: int) -> dict[str, np.ndarray]:
    """At least `PAIRS` pairs: lengths of both parts, labels, and how their second parts lie."""
    found: list[np.ndarray] = []
    rng = np.random.default_rng(0)
    while sum(map(len, found)) < PAIRS:
        found.append(_pairs_of_a_portion(rng, kind, seq_len))
    columns = np.concatenate(found).T
    return dict(zip(("first", "second", "is_next", "ends", "begins"), columns, strict=True))


def _pairs_of_a_portion(rng: np.random.Generator, kind: str, seq_len: int) -> np.ndarray:
    ranges = SENTENCES[kind]
    counts = [rng.integers(*ranges[n % len(ranges)]) for n in range(3000 // ranges[-1][1])]
    # headings, and sentences of all lengths
    lengths = [rng.geometric(rng.choice([0.4, 0.05, 0.03], size=count)) for count in counts]
    flat = np.concatenate(lengths)
    tokens = np.arange(10, 10 + flat.sum(), dtype=np.uint32)
    sentence_ends = tokens[np.cumsum(flat) - 1]
    document_begins = tokens[np.cumsum([0, *map(np.sum, lengths)])[:-1]]
    pieces = iter(np.split(tokens, np.cumsum(flat)[:-1]))
    documents = [[next(pieces) for _ in range(count)] for count in counts]
    ids = mix(rng.integers(2**63, size=len(counts)).astype(np.uint64)).tolist()
    made = make_pairs(
        documents, ids, FRAME, seq_len=seq_len, min_tokens=2, dtype=np.dtype(np.uint32)
    )
    assert made.extras is not None
    starts = np.array([int.from_bytes(extra[:4], "little") for extra in made.extras])
    labels = [extra[4] for extra in made.extras]
    ends = np.cumsum(made.lengths)
    last, first = made.tokens[ends - 2], made.tokens[ends - made.lengths + starts]
    lies = [np.isin(last, sentence_ends), np.isin(first, document_begins)]
    return np.array([starts - 2, made.lengths - starts - 1, labels, *lies]).T


def accuracy(labels: np.ndarray, *features: np.ndarray) -> float:
    """Of a table that knows, for each value of the features, the commoner label of one half of the
    pairs, on the other half; both ways."""
    cells = np.zeros(len(labels), dtype=np.int64)
    for feature in features:
        cells = cells * (int(feature.max()) + 1) + feature
    _, cells = np.unique(cells, return_inverse=True)
    half = np.arange(len(labels)) < len(labels) // 2
    right = 0
    for train in (half, ~half):
        votes = np.bincount(cells[train], weights=labels[train] - 0.5, minlength=cells.max() + 1)
        right += ((votes[cells] > 0) == labels)[~train].sum()
    return right / len(labels)


@CORPORA
def test_a_classifier_on_lengths_is_no_better_than_chance(kind: str, seq_len: int) -> None:
    found = pairs(kind, seq_len)
    first, second, labels = found["first"], found["second"], found["is_next"]
    # partners share a label: half of the labels are independent, and 1% is more than 3 sigma
    assert 3 * 0.5 / np.sqrt(len(labels) / 2) < 0.01
    commoner = max(labels.mean(), 1 - labels.mean())
    assert commoner < 0.51
    total = first + second
    by = [(first,), (second,), (total,), (first, second), (first // 8, second // 8), (total // 4,)]
    assert max(accuracy(labels, *features) for features in by) < commoner + 0.01
