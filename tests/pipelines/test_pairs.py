"""Sentence pairs: half of them real, all of them framed, none too long."""

from __future__ import annotations

import numpy as np

from elastrata_pipelines.hashing import mix
from elastrata_pipelines.preparation.pairs import PairFrame, make_pairs, split_sentences
from elastrata_pipelines.preparation.samples import Samples

FRAME = PairFrame((1,), (2,), (2,))
DOCUMENTS, SENTENCES, LENGTH = 40, 30, 7


def documents() -> list[list[np.ndarray]]:
    """Documents of sentences, all of whose tokens are different."""
    tokens = np.arange(10, 10 + DOCUMENTS * SENTENCES * LENGTH, dtype=np.uint32)
    return [list(part) for part in tokens.reshape(DOCUMENTS, SENTENCES, LENGTH)]


def make(seq_len: int = 64, count: int = DOCUMENTS) -> Samples:
    ids = mix(np.arange(count, dtype=np.uint64)).tolist()
    return make_pairs(
        documents()[:count], ids, FRAME, seq_len=seq_len, min_tokens=2, dtype=np.dtype(np.uint16)
    )


def parts(samples: Samples) -> list[tuple[list[int], list[int], bool]]:
    found = []
    assert samples.extras is not None
    ends = np.cumsum(samples.lengths)[:-1]
    for tokens, extra in zip(np.split(samples.tokens, ends), samples.extras, strict=True):
        start = int.from_bytes(extra[:4], "little")
        assert (tokens[0], tokens[start - 1], tokens[-1]) == (1, 2, 2)
        found.append((tokens[1 : start - 1].tolist(), tokens[start:-1].tolist(), bool(extra[4])))
    return found


def document_of(token: int) -> int:
    return (token - 10) // (SENTENCES * LENGTH)


def test_pairs_fit_and_about_half_are_real() -> None:
    samples = make()
    assert samples.lengths.max() <= 64
    labels = [is_next for _, _, is_next in parts(samples)]
    assert 0.4 < np.mean(labels) < 0.6
    assert len(set(samples.ids.tolist())) == len(samples)


def test_real_pairs_follow_one_another_and_random_ones_come_from_elsewhere() -> None:
    for first, second, is_next in parts(make()):
        assert first
        assert second
        if is_next:
            assert second[0] == first[-1] + 1
        else:
            assert document_of(second[0]) != document_of(first[0])


def test_next_to_all_text_is_used_and_next_to_none_of_it_twice() -> None:
    samples = make(seq_len=3 + 7 * LENGTH)  # five samples a document, nothing cut or left alone
    tokens = np.concatenate(
        [part for first, second, _ in parts(samples) for part in (first, second)]
    )
    most = 0.01 * DOCUMENTS * SENTENCES * LENGTH  # a couple of partners of different shapes
    assert len(tokens) - most < len(set(tokens)) > DOCUMENTS * SENTENCES * LENGTH - most


def test_sentences() -> None:
    text = 'One is "here." Two!  Three (3.5 of them)?\nFour\n\nfive.'
    assert split_sentences(text) == [
        'One is "here."',
        "Two!",
        "Three (3.5 of them)?",
        "Four",
        "five.",
    ]
