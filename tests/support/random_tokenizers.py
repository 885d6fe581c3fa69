"""Small tokenizers as their files describe them, and settings that change what they do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from elastrata_pipelines.preparation import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from support.texts import plain_text, tricky_texts

Description = dict[str, Any]
RARE = "zyzzyva"
"""A word that no tokenizer here was trained on."""
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
HARD_PIECES = [
    *("the", "old", "RIVER", RARE, "x" * 300, "ab" * 200, "1984", "12345678", "½", "Ⅷ", "don't"),
    *("'S", "'\u017f", "it's", "'ll", "\u2019s", "Straße", "İ", "ﬁ", "e\u0301"),
    *("\u0301", "\u0323\u0301"),
    *("漢字", "中文。", "한국어", "🙂", "👩\u200d👩\u200d👧", "🇩🇪", "𐍈"),
    *("\u200b", "\ufeff", "\x00", "\x85", "\ufffd"),
    *("<|endoftext|>", "[SEP]", "<pad>", "[MASK]", "<unk>", "##s", "Ġ", "▁", "-", "...", "(so)"),
    *(" ", "  ", " " * 70, "\n", "\r\n", "\n\n\n", "\t", "\u00a0", "\u2003", "\x0b", "\u2028"),
]  # fmt: skip


def hard_text(rng: random.Random, pieces: int = 40) -> str:
    """A text of rare words, marks, digits, odd spaces and the names of special tokens."""
    return "".join(rng.choice(HARD_PIECES) + rng.choice(["", " ", ""]) for _ in range(pieces))


def described(kind: str) -> Description:
    """The description of a small tokenizer: `bytes`, `bert`, `dna`, `unigram` or `metaspace`."""
    description: Description = json.loads(_json(kind))
    return description


@lru_cache
def _json(kind: str) -> str:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    if kind in ("bytes", "bert"):
        values = {"train": "bpe" if kind == "bytes" else "wordpiece", "vocab_size": 700}
        config = TokenizerConfig.model_validate(values)
        return train_tokenizer(tricky_texts(), config, seq_len=64).tokenizer_json
    if kind == "dna":
        words = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "A": 3, "C": 4, "G": 5, "T": 6}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
        return str(tokenizer.to_str())
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator([plain_text(seed, 300) for seed in range(20)], trainer)
    return str(tokenizer.to_str())


def split_by(
    pattern: str,
    *,
    kind: str = "Regex",
    behavior: str = "Isolated",
    invert: bool = False,
    use_regex: bool = False,
) -> Description:
    """The pre-tokenizer that splits by a pattern, then writes bytes."""  # fmt: skip
    split = {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}
    return {"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=use_regex)]}


def byte_level(*, add_prefix_space: bool = False, use_regex: bool = True) -> Description:
    return {
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True,
        "use_regex": use_regex,
    }  # fmt: skip


def added(text: str, number: int, **settings: bool) -> Description:
    values = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, "special": False, **values, **settings}


def set_model(name: str, value: Any) -> Callable[[Description], None]:
    def change(description: Description) -> None:
        description["model"][name] = value

    return change


def set_part(name: str, value: Any) -> Callable[[Description], None]:
    def change(description: Description) -> None:
        description[name] = value

    return change


def ignore_merges(description: Description) -> None:
    """As Llama 3: a word of the vocabulary is one token, whatever the merges would make of it."""
    vocab = description["model"]["vocab"]
    vocab[f"Ġ{RARE}"] = max(vocab.values()) + 1
    description["model"]["ignore_merges"] = True


def lose_a_byte(description: Description) -> None:
    model, lost = description["model"], "ÿ"
    model["merges"] = [merge for merge in model["merges"] if lost not in "".join(merge)]
    del model["vocab"][lost]


def turn_merges_around(description: Description) -> None:
    """Later merges come first: most need what is made after them."""
    description["model"]["merges"].reverse()


def make_a_token_twice(description: Description) -> None:
    """A second way to a token of three letters, and what it needs, before all other merges."""
    model = description["model"]
    left, right = next(m for m in model["merges"] if len(m[0]) == 2 and len(m[1]) == 1)
    model["vocab"][left[1] + right] = max(model["vocab"].values()) + 1
    more = [[left[1], right], [left[0], left[1] + right]]
    model["merges"] = more + [merge for merge in model["merges"] if merge != [left[1], right]]


def make_a_token_of_no_bytes(description: Description) -> None:
    model = description["model"]
    for token in ("漢", "字", "漢字"):
        model["vocab"][token] = max(model["vocab"].values()) + 1
    model["merges"].append(["漢", "字"])


def give_two_tokens_one_id(description: Description) -> None:
    vocab = description["model"]["vocab"]
    first, second = ("".join(merge) for merge in description["model"]["merges"][:2])
    vocab[second] = vocab[first]


def add_a_token(**settings: bool) -> Callable[[Description], None]:
    def change(description: Description) -> None:
        number = max(description["model"]["vocab"].values()) + 1
        description["added_tokens"].append(added("old r", number, **settings))

    return change


DISQUALIFYING: dict[str, Callable[[Description], None]] = {
    "ignore_merges": ignore_merges,
    "suffix of words": set_model("end_of_word_suffix", "</w>"),
    "no merge, and ignored": set_model("ignore_merges", True),
    "NFC": set_part("normalizer", {"type": "NFC"}),
    "lower case": set_part("normalizer", {"type": "Lowercase"}),
    "an empty normalizer": set_part("normalizer", {"type": "Sequence", "normalizers": []}),
    "prefix space": set_part("pre_tokenizer", byte_level(add_prefix_space=True)),
    "no expression": set_part("pre_tokenizer", byte_level(use_regex=False)),
    "another expression": set_part("pre_tokenizer", split_by(r"\w+|\W")),
    "Ruby's lines": set_part("pre_tokenizer", split_by(r"^.*$|\n")),
    "text as pattern": set_part("pre_tokenizer", split_by(GPT2, kind="String")),
    "inverted": set_part("pre_tokenizer", split_by(CL100K, invert=True)),
    "removed": set_part("pre_tokenizer", split_by(CL100K, behavior="Removed")),
    "merged": set_part("pre_tokenizer", split_by(CL100K, behavior="MergedWithNext")),
    "contiguous": set_part("pre_tokenizer", split_by(CL100K, behavior="Contiguous")),
    "split twice": set_part("pre_tokenizer", split_by(CL100K, use_regex=True)),
    "digits first": set_part(
        "pre_tokenizer",
        {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level()],
        },
    ),
    "no pre-tokenizer": set_part("pre_tokenizer", None),
    "Whitespace": set_part("pre_tokenizer", {"type": "Whitespace"}),
    "a byte less": lose_a_byte,
    "merges turned around": turn_merges_around,
    "two merges to one token": make_a_token_twice,
    "a token of no bytes": make_a_token_of_no_bytes,
    "two tokens of one id": give_two_tokens_one_id,
    "a token inside words": add_a_token(),
    "a token inside words, normalized": add_a_token(normalized=True),
    "a token with its spaces": add_a_token(lstrip=True, rstrip=True),
    "a token as a single word": add_a_token(single_word=True),
}
"""Settings of byte-level BPE with which tiktoken cannot follow, or is not known to."""

HARMLESS: dict[str, Callable[[Description], None]] = {
    "nothing": lambda description: None,
    "dropout": set_model("dropout", 0.5),
    "unknown token": set_model("unk_token", "<pad>"),
    "unknown token that is not there": set_model("unk_token", "<none>"),
    "fused": set_model("fuse_unk", True),
    "byte fallback": set_model("byte_fallback", True),
    "empty affixes": set_model("continuing_subword_prefix", ""),
    "cl100k": set_part("pre_tokenizer", split_by(CL100K)),
    "Qwen": set_part("pre_tokenizer", split_by(CL100K.replace("{1,3}", ""))),
    "GPT-2, split": set_part("pre_tokenizer", split_by(GPT2)),
    "a sequence of one": set_part(
        "pre_tokenizer", {"type": "Sequence", "pretokenizers": [byte_level()]}
    ),
    "a special token inside words": add_a_token(special=True, lstrip=True, single_word=True),
    "truncation": set_part(
        "truncation",
        {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
    ),
    "padding": set_part(
        "padding",
        {
            "strategy": {"Fixed": 5000}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
        },
    ),
}  # fmt: skip
"""Settings that tiktoken's place does not depend on."""
