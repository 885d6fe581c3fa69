"""Encoders: none takes a tokenizer's place unless it is equal by construction."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation.encoders import make_encoder
from elastrata_pipelines.preparation.tokenizer import TokenizerFiles
from support.random_tokenizers import (
    CL100K,
    DISQUALIFYING,
    GPT2,
    HARD_PIECES,
    HARMLESS,
    RARE,
    Description,
    described,
    hard_text,
    ignore_merges,
)

ORDINARY = ["the old river and the sea"]
"""The sample of it tells no tokenizer from another."""


def own_ids(description: Description, texts: Sequence[str]) -> list[list[int]]:
    """The ids that the tokenizer itself gives, whole and without chance."""
    from tokenizers import Tokenizer

    model = {**description["model"], "dropout": None}
    whole = {**description, "truncation": None, "padding": None, "model": model}
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    tokenizer.encode_special_tokens = True
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def given_ids(description: Description, texts: Sequence[str]) -> tuple[list[list[int]], str]:
    """The ids of each text that a preparation stores, and the name of the encoder."""
    tokens, lengths, name = make_encoder(json.dumps(description)).encode(texts)
    return [ids.tolist() for ids in np.split(tokens, np.cumsum(lengths)[:-1])], name


def changed(change: Callable[[Description], None], kind: str = "bytes") -> Description:
    description = described(kind)
    change(description)
    return description


def test_a_word_that_merges_do_not_make_keeps_its_id() -> None:
    """As in Llama 3, beyond what a sample of 1,024 characters shows."""
    description = changed(ignore_merges)
    text = "the old river " * 100 + RARE
    (ids,), name = given_ids(description, [text])
    assert name == "tokenizers"
    assert ids[-1] == description["model"]["vocab"][f"Ġ{RARE}"]
    assert [ids] == own_ids(description, [text])


@pytest.mark.parametrize("setting", DISQUALIFYING)
def test_a_setting_that_is_not_followed_keeps_the_tokenizer(setting: str) -> None:
    description = changed(DISQUALIFYING[setting])
    texts = [*ORDINARY, *(hard_text(random.Random(seed)) for seed in range(5))]
    ids, name = given_ids(description, texts)
    assert name == "tokenizers"
    assert ids == own_ids(description, texts)
    assert given_ids(description, ORDINARY)[1] == "tokenizers"


def test_a_setting_that_is_not_known_keeps_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a later version of tokenizers."""
    from elastrata_pipelines.preparation import encoders

    description = changed(HARMLESS["byte fallback"])
    assert given_ids(description, ORDINARY)[1] == "tiktoken"
    known = encoders._BPE_SETTINGS - {"byte_fallback"}
    monkeypatch.setattr(encoders, "_BPE_SETTINGS", known)
    make_encoder.cache_clear()
    assert given_ids(description, ORDINARY)[1] == "tokenizers"
    make_encoder.cache_clear()


@pytest.mark.parametrize("setting", HARMLESS)
def test_a_setting_without_effect_on_ids_leaves_the_fast_encoder(setting: str) -> None:
    description = changed(HARMLESS[setting])
    pieces = st.lists(st.sampled_from(HARD_PIECES) | st.text(max_size=5), max_size=40)

    @settings(max_examples=15)
    @given(pieces.map("".join))
    def check(text: str) -> None:
        ids, name = given_ids(description, [text])
        assert name == "tiktoken"
        assert ids == own_ids(description, [text])

    check()


@pytest.mark.parametrize("seed", range(4))
def test_merges_of_any_training_give_equal_ids(seed: int) -> None:
    """Of few letters, so that many merges compete for the same ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = random.Random(seed)
    words = ["".join(rng.choices("abc", k=rng.randint(1, 12))) for _ in range(3000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    description = json.loads(tokenizer.to_str())
    others = ["".join(rng.choices("abc", k=rng.choice([5, 20, 99, 101, 400]))) for _ in range(300)]
    ids, name = given_ids(description, others)
    assert name == "tiktoken"
    assert ids == own_ids(description, others)


@pytest.mark.parametrize("kind", ["bert", "dna", "unigram", "metaspace"])
def test_other_tokenizers_give_their_own_ids(kind: str) -> None:
    texts = ["ACGT", *(hard_text(random.Random(seed)) for seed in range(10))]
    ids, name = given_ids(described(kind), texts)
    assert name == ("tokenizers with a word cache" if kind == "bert" else "tokenizers")
    assert ids == own_ids(described(kind), texts)


@pytest.mark.parametrize(
    "normalizer",
    [
        {"clean_text": clean, "handle_chinese_chars": chinese, "strip_accents": strip,
         "lowercase": lower}
        for clean, chinese, strip, lower in [
            (True, True, None, True), (False, True, None, True), (True, False, True, False),
            (False, False, False, False), (True, True, False, True),
        ]
    ],
)  # fmt: skip
def test_words_of_bert_give_the_ids_of_the_text(normalizer: dict[str, Any]) -> None:
    description = described("bert")
    description["normalizer"] = {"type": "BertNormalizer", **normalizer}
    texts = [hard_text(random.Random(seed), 200) for seed in range(20)]
    ids, name = given_ids(description, texts)
    assert name == "tokenizers with a word cache"
    assert ids == own_ids(description, texts)


def test_bert_with_another_part_keeps_the_tokenizer() -> None:
    lower: Description = {"type": "Lowercase"}
    for part, value in (("normalizer", lower), ("pre_tokenizer", {"type": "Whitespace"})):
        description = {**described("bert"), part: value}
        ids, name = given_ids(description, ["the OLD-river"])
        assert name == "tokenizers"
        assert ids == own_ids(description, ["the OLD-river"])


@pytest.mark.parametrize("pattern", [GPT2, CL100K])
def test_every_character_is_of_the_same_class_to_both_libraries(pattern: str) -> None:
    description = described("bytes")
    if pattern == CL100K:
        HARMLESS["cl100k"](description)
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    some = [*characters[:0x3000], *characters[0x3000::97]]
    texts = ["".join(f"a{c}1{c} {c}'{c}S" for c in some[at : at + 500])
             for at in range(0, len(some), 500)]  # fmt: skip
    ids, name = given_ids(description, texts)
    assert name == "tiktoken"
    assert ids == own_ids(description, texts)


def test_text_without_ids_is_refused_in_a_line() -> None:
    description = described("dna")
    description["model"]["unk_token"] = "<none>"
    assert given_ids(description, ["ACGT"])[0] == own_ids(described("dna"), ["ACGT"])
    files = TokenizerFiles(json.dumps(description), "{}")
    for encode in (lambda: given_ids(description, ["ACxGT"]), lambda: files.encode("ACxGT")):
        with pytest.raises(UserError, match=r"^tokenizer: gives no ids for a text \(WordLevel"):
            encode()
