"""Cuts: a long text in parts has the ids of the whole, wherever a tokenizer lets it."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastrata_pipelines.preparation import TokenizerConfig, encoders
from elastrata_pipelines.preparation.encoders import (
    CheckedEncoder,
    ExactEncoder,
    make_encoder,
    split_text,
)
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.preparation.work import _pieces
from support.texts import plain_text

KINDS = ("wordpiece", "bpe", "cl100k", "metaspace", "prepended", "unigram")
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = [
    "the", "old", "river", "Straße", "don't", "1984", "naïve", "e.g.", "слово", "。", "你好",
    "-", "end.", "(so)", "x" * 30, "'s", "ไทย", "\u0301", "a\u0308",
]  # fmt: skip
GAPS = [" ", " ", " ", "\n", "  ", "\n\n", "\r\n", "\t", ", ", ""]


@lru_cache
def tokenizer_json(kind: str) -> str:
    """A small tokenizer of one kind, trained on the words of this file."""
    text = [f"{plain_text(seed, 300)} {' '.join(WORDS)}" for seed in range(20)]
    if kind in ("wordpiece", "bpe"):
        config = TokenizerConfig(train=kind, vocab_size=700)
        return train_tokenizer(text, config, seq_len=64).tokenizer_json
    description = json.loads(_trained(kind, text))
    if kind == "prepended":  # as Llama's was: no pre-tokenizer, a mark before every text
        description["pre_tokenizer"] = None
        description["normalizer"] = {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        }
    return json.dumps(description)


def _trained(kind: str, text: list[str]) -> str:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(
            vocab_size=700, special_tokens=["<unk>"], show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        )  # fmt: skip
    if kind == "cl100k":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(CL100K), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(text, trainer)
    return str(tokenizer.to_str())


def exact(kind: str) -> ExactEncoder:
    from tokenizers import Tokenizer

    return ExactEncoder(Tokenizer.from_str(tokenizer_json(kind)))


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets parts have 400 characters, so that cuts are many."""
    monkeypatch.setattr(encoders, "MAX_CHARACTERS", 400)
    monkeypatch.setattr(encoders, "_SEARCHED_CHARACTERS", 390)
    return 400


texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=1).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_have_the_ids_of_the_whole(kind: str, short_parts: int) -> None:
    encoder = CheckedEncoder(None, exact(kind))

    @settings(deadline=None, max_examples=20)
    @given(seed=st.integers(0, 2**32), drawn=texts)
    def check(seed: int, drawn: str) -> None:
        rng = random.Random(seed)
        text = drawn + "".join(rng.choice(WORDS) + rng.choice(GAPS) for _ in range(600))
        cut = list(split_text(text, encoder._same))
        assert len(cut) > 4
        assert max(len(part) for part, _ in cut) <= short_parts
        assume(all(sure for _, sure in cut))
        tokens, lengths, _ = encoder.encode(["before", text, "after"])
        whole = [exact(kind)([piece]).tokens for piece in ("before", text, "after")]
        assert lengths.tolist() == [len(ids) for ids in whole]
        assert np.array_equal(tokens, np.concatenate(whole))

    check()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "cl100k"])
def test_the_fast_encoders_cut_at_the_same_places(kind: str, short_parts: int) -> None:
    encoder = make_encoder(tokenizer_json(kind))
    text = plain_text(7, 4000)
    assert len(text) > 4 * short_parts
    tokens, _, name = encoder.encode([text])
    assert name != ExactEncoder.name
    assert np.array_equal(tokens, exact(kind)([text]).tokens)


def test_a_run_without_a_place_to_cut_is_cut_where_it_is_full(short_parts: int) -> None:
    text = f"{'a' * 1000} the old river"
    cut = list(split_text(text, lambda whole, left, right: True))
    assert "".join(part for part, _ in cut) == text
    assert [sure for _, sure in cut] == [False, False, True]
    assert max(len(part) for part, _ in cut) == short_parts


def test_a_place_where_the_ids_differ_is_not_taken(short_parts: int) -> None:
    text = "word " * 200
    assert all(sure for _, sure in list(split_text(text, lambda *_: True)))
    assert not all(sure for _, sure in list(split_text(text, lambda *_: False)))
    assert "".join(part for part, _ in split_text(text, lambda *_: False)) == text


def test_shorter_texts_are_not_touched() -> None:
    def never(whole: str, left: str, right: str) -> bool:
        raise AssertionError

    text = "a b" * (encoders.MAX_CHARACTERS // 3)
    ((part, sure),) = split_text(text, never)
    assert part is text
    assert sure


def test_a_tokenizer_is_trained_on_no_very_long_word(short_parts: int) -> None:
    long_line = "the old river " * 500
    assert "".join(_pieces(f"{long_line}\nshort\n")) == f"{long_line}\nshort\n"
    pieces = list(_pieces("x" * 10_000 + " the old river"))
    assert sum(map(len, pieces)) <= short_parts
