"""Sentence pairs for next-sentence prediction (Devlin et al., 2018, section 3.1, task 2)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastrata_pipelines.hashing import combine, key, mix, uniform
from elastrata_pipelines.preparation.samples import Samples, Tokens, pair_extra

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+|\n+""")
_CUT, _RANDOM, _OTHER, _FIRST = 1, 2, 3, 4


@dataclass(frozen=True)
class PairFrame:
    """The ids a tokenizer puts around a pair: prefix A middle B suffix."""

    prefix: tuple[int, ...]
    middle: tuple[int, ...]
    suffix: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of a pair that belong to neither text."""
        return len(self.prefix) + len(self.middle) + len(self.suffix)


def split_sentences(text: str) -> list[str]:
    """Sentences by their final punctuation, and lines; a rule of thumb, good enough for pairs."""
    return [part for part in _SENTENCE_END.split(text) if part and not part.isspace()]


def make_pairs(
    documents: Sequence[Sequence[Tokens]],
    ids: Sequence[int],
    frame: PairFrame,
    *,
    seq_len: int,
    min_tokens: int,
    dtype: np.dtype[Any],
) -> Samples:
    """Pairs out of documents, each a list of tokenised sentences.

    Consecutive sentences are gathered until they fill a sample and cut in two at a random place.
    In half of the pairs the second part is then replaced by sentences of another document, and
    used again as the first of the next pair. All choices are hashes of (document, pair number).

    Args:
        documents: per document its sentences' ids; documents without sentences yield nothing.
        ids: identity of each document.
        frame: the tokenizer's frame of a pair.
        seq_len: no pair has more tokens.
        min_tokens: pairs with fewer tokens, the frame's not counted, are left out.
        dtype: type of the tokens.
    """
    room = seq_len - frame.num_tokens
    out_ids: list[int] = []
    framed: list[tuple[Tokens, bytes]] = []
    numbered = [(place, identity) for place, identity in enumerate(ids) if documents[place]]
    filled = [documents[place] for place, _ in numbered]
    for place, (sentences, (_, identity)) in enumerate(zip(filled, numbered, strict=True)):
        begin = number = 0
        while begin < len(sentences):
            sample_id = int(combine(identity, number))
            first, second, is_next, begin = _pair(filled, place, begin, sample_id, room)
            number += 1
            if len(second) and len(first) + len(second) >= min_tokens:
                out_ids.append(sample_id)
                framed.append(_framed(first, second, is_next, frame, dtype))
    return Samples(
        ids=np.array(out_ids, dtype=np.uint64),
        lengths=np.array([len(tokens) for tokens, _ in framed], dtype=np.int64),
        tokens=np.concatenate([np.empty(0, dtype), *(tokens for tokens, _ in framed)]),
        extras=tuple(extra for _, extra in framed),
    )


def _framed(
    first: Tokens, second: Tokens, is_next: bool, frame: PairFrame, dtype: np.dtype[Any]
) -> tuple[Tokens, bytes]:
    """The pair's ids, and what else a shard stores of it."""
    parts = [frame.prefix, first, frame.middle, second, frame.suffix]
    tokens = np.concatenate([np.asarray(part, dtype=dtype) for part in parts])
    start = len(frame.prefix) + len(first) + len(frame.middle)
    return tokens, pair_extra(start, is_next)


def _draw(sample_id: int, purpose: int) -> float:
    return float(uniform(mix(combine(sample_id, key(purpose)))))


def _pair(
    documents: Sequence[Sequence[Tokens]], place: int, begin: int, sample_id: int, room: int
) -> tuple[Tokens, Tokens, bool, int]:
    """First part, second part, whether that is the next one, and the sentence to go on with."""
    sentences = documents[place]
    end, total = begin, 0
    while end < len(sentences) and (total < room or end - begin < 2):
        total += len(sentences[end])
        end += 1
    middle = begin + 1 + int(_draw(sample_id, _CUT) * max(0, end - begin - 1))
    first = np.concatenate(sentences[begin:middle])
    is_next = middle < end and _draw(sample_id, _RANDOM) < 0.5
    if is_next:
        second = np.concatenate(sentences[middle:end])
    else:
        second = _other_text(documents, place, begin, middle, sample_id, room)
        end = middle
    first, second = _fit(first, second, room)
    return first, second, is_next, end


def _other_text(
    documents: Sequence[Sequence[Tokens]],
    place: int,
    begin: int,
    middle: int,
    sample_id: int,
    room: int,
) -> Tokens:
    """Sentences from a random place of another document; of this one where there is no other."""
    other = int(_draw(sample_id, _OTHER) * (len(documents) - 1))
    if len(documents) > 1:
        sentences = documents[other + (other >= place)]
    else:
        sentences = [*documents[place][:begin], *documents[place][middle + 1 :]]
    start = int(_draw(sample_id, _FIRST) * len(sentences))
    wanted, taken = max(1, room // 2), list[Tokens]()
    while start < len(sentences) and sum(map(len, taken)) < wanted:
        taken.append(sentences[start])
        start += 1
    return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)


def _fit(first: Tokens, second: Tokens, room: int) -> tuple[Tokens, Tokens]:
    """Shortens the longer part, the first at its front, the second at its end: they still meet."""
    over = max(0, len(first) + len(second) - room)
    longer = abs(len(first) - len(second))
    from_longer = min(over, longer)
    rest = over - from_longer
    cut_first, cut_second = rest // 2, rest - rest // 2
    if len(first) > len(second):
        cut_first += from_longer
    else:
        cut_second += from_longer
    return first[cut_first:], second[: len(second) - cut_second]
