"""Packing: no token lost, none invented, no sample too long, boundaries where documents begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.hashing import mix
from elastrata_pipelines.preparation.packing import (
    Frame,
    Texts,
    pack_best_fit,
    pack_concat,
    split_documents,
)
from elastrata_pipelines.preparation.samples import Samples

Pack = Callable[..., Samples]
BERT, GPT = Frame(prefix=(1,), suffix=(2,)), Frame(end=(3,))
frames = st.sampled_from([BERT, GPT, Frame()])
sizes = st.lists(st.integers(0, 60), max_size=30)


def make_texts(lengths: list[int]) -> Texts:
    """Documents whose tokens are all different: token 10 is the first of the first one."""
    total = sum(lengths)
    return Texts(
        mix(np.arange(len(lengths), dtype=np.uint64)),
        np.array(lengths, dtype=np.int64),
        np.arange(10, 10 + total).astype(np.uint16),
    )


def split(samples: Samples) -> list[list[int]]:
    return [part.tolist() for part in np.split(samples.tokens, np.cumsum(samples.lengths))[:-1]]


def fragments(samples: Samples) -> list[list[int]]:
    """The pieces of documents in all samples, frames included."""
    pieces = []
    assert samples.extras is not None
    for tokens, extra in zip(split(samples), samples.extras, strict=True):
        starts = [0, *np.frombuffer(extra, "<i4").tolist(), len(tokens)]
        pieces += [tokens[a:b] for a, b in pairwise(starts)]
    return pieces


@pytest.mark.parametrize("pack", [split_documents, pack_concat, pack_best_fit])
@given(lengths=sizes, frame=frames, seq_len=st.integers(8, 40))
def test_every_token_appears_once_in_samples_that_fit(
    pack: Pack, lengths: list[int], frame: Frame, seq_len: int
) -> None:
    texts = make_texts(lengths)
    samples = pack(texts, frame, seq_len=seq_len, min_tokens=1)
    assert np.all(samples.lengths <= seq_len)
    assert np.all(samples.lengths > 0)
    found = Counter(samples.tokens.tolist())
    text = {token: count for token, count in found.items() if token >= 10}
    assert text == dict.fromkeys(texts.tokens.tolist(), 1)
    assert found[3] <= (np.count_nonzero(texts.lengths) if frame == GPT else 0)
    assert len(set(samples.ids.tolist())) == len(samples)


@pytest.mark.parametrize("pack", [pack_concat, pack_best_fit])
@given(lengths=sizes, frame=frames, seq_len=st.integers(8, 40))
def test_boundaries_separate_documents(
    pack: Pack, lengths: list[int], frame: Frame, seq_len: int
) -> None:
    texts = make_texts(lengths)
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for piece in fragments(pack(texts, frame, seq_len=seq_len, min_tokens=1)):
        inner = piece[len(frame.prefix) : len(piece) - len(frame.suffix)]
        if frame == BERT:
            assert (piece[0], piece[-1]) == (1, 2)
        text = [token for token in inner if token >= 10]
        assert inner == [3] or text == list(range(text[0], text[0] + len(text)))
        assert len({document_of[token - 10] for token in text}) <= 1


@given(lengths=sizes, seq_len=st.integers(8, 40))
def test_concat_fills_all_samples_but_the_last(lengths: list[int], seq_len: int) -> None:
    samples = pack_concat(make_texts(lengths), GPT, seq_len=seq_len, min_tokens=1)
    assert np.all(samples.lengths[:-1] == seq_len)


@given(lengths=sizes, seq_len=st.integers(8, 40))
def test_best_fit_cuts_only_long_documents(lengths: list[int], seq_len: int) -> None:
    samples = pack_best_fit(make_texts(lengths), BERT, seq_len=seq_len, min_tokens=1)
    assert len(fragments(samples)) == sum(-(-length // (seq_len - 2)) for length in lengths)


@given(lengths=sizes)
def test_cut_frames_every_chunk(lengths: list[int]) -> None:
    samples = split_documents(make_texts(lengths), BERT, seq_len=12, min_tokens=1)
    assert all((sample[0], sample[-1]) == (1, 2) for sample in split(samples))
    assert len(samples) == sum(-(-length // 10) for length in lengths)


def test_short_samples_are_dropped() -> None:
    samples = split_documents(make_texts([3, 12, 25]), BERT, seq_len=12, min_tokens=4)
    assert samples.lengths.tolist() == [12, 12, 12, 7]


def test_ids_do_not_depend_on_other_documents() -> None:
    both = make_texts([25, 17])
    alone = Texts(both.ids[1:], both.lengths[1:], both.tokens[25:])
    expected = split_documents(alone, BERT, seq_len=12, min_tokens=1).ids
    assert (
        split_documents(both, BERT, seq_len=12, min_tokens=1).ids[-2:].tolist() == expected.tolist()
    )
