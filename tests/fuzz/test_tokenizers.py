"""Tokenizers with settings at random: the ids and frames are those that the tokenizer itself gives
without chance, or it is refused in a line. Never other ids without a word."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.preparation.encoders import make_encoder
from elastrata_pipelines.preparation.tokenizer import load_tokenizer
from support.mutations import quick, seeds
from support.random_tokenizers import (
    DISQUALIFYING,
    HARMLESS,
    Description,
    described,
    hard_text,
    set_model,
    set_part,
)
from support.verdict import read_or_refused

CASES = quick(50)
KINDS = ("bytes", "bytes", "bert", "dna", "unigram", "metaspace")
TEXTS = 3


def _template(single: str, pair: str) -> Description:
    from tokenizers import Tokenizer, models
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer(models.BPE())
    special = [("[X]", 1), ("[Y]", 2)]
    tokenizer.post_processor = TemplateProcessing(single, pair, special_tokens=special)
    description: Description = json.loads(tokenizer.to_str())["post_processor"]
    return description


FRAMES = [
    ("[X] $A [Y]", "[X] $A [Y] $B:1 [Y]:1"), ("[X] $A", "[X] $A $B:1"), ("$A [Y]", "$A [Y] $B [Y]"),
    ("[X] [Y]", "[X] $A [Y] $B"), ("$A $A", "$A [X] $B"), ("[X] [X] $A", "$B [Y] $A"),
]  # fmt: skip
OTHERS: tuple[Callable[[Description], None], ...] = (
    *(set_part("normalizer", {"type": kind}) for kind in ("NFC", "NFKD", "Lowercase")),
    *(set_part("pre_tokenizer", {"type": kind}) for kind in ("Whitespace", "Punctuation")),
    set_model("unk_token", "<none>"),
    set_model("unk_token", None),
    set_model("fuse_unk", True),
    set_model("dropout", 0.3),
    set_model("max_input_chars_per_word", 3),
    set_model("continuing_subword_prefix", "@@"),
)


def _drawn(rng: random.Random) -> tuple[Description, str]:
    """A tokenizer with some settings of others, and what they are."""
    kind = rng.choice(KINDS)
    description, names = described(kind), [kind]
    if rng.random() < 0.5:
        frame = rng.choice(FRAMES)
        description["post_processor"] = _template(*frame)
        names.append(str(frame))
    named = {**HARMLESS, **(DISQUALIFYING if kind == "bytes" else {})}
    named |= {f"other {number}": change for number, change in enumerate(OTHERS)}
    for name in rng.sample(sorted(named), rng.choice([0, 1, 1, 2])):
        try:
            named[name](description)
        except (AttributeError, KeyError, StopIteration, TypeError, ValueError):
            continue  # such as a vocabulary that is a list
        names.append(name)
    return description, " + ".join(names)


def _itself(description: Description) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None
    tokenizer.encode_special_tokens = True
    return tokenizer


def _ours(path: Path, texts: list[str]) -> tuple[list[list[int]], list[int], list[int]]:
    """The ids of each text, and what is around one."""
    files = load_tokenizer(str(path))
    frame = files.frame()
    ids = [make_encoder(files.tokenizer_json).encode([text])[0].tolist() for text in texts]
    return ids, list(frame.prefix), list(frame.suffix)


@pytest.mark.parametrize("seed", seeds())
def test_any_tokenizer_is_refused_or_gives_its_own_ids(tmp_path: Path, seed: int) -> None:
    rng, refused = random.Random(seed), 0
    path = tmp_path / "tokenizer.json"
    for number in range(CASES):
        description, name = _drawn(rng)
        case = f"seed {seed}, case {number}: {name}"
        texts = ["ACGT", *(hard_text(rng, 20) for _ in range(TEXTS))]
        path.write_text(json.dumps(description), encoding="utf-8")
        found = read_or_refused(partial(_ours, path, texts), case, "tokenizer")
        refused += found is None
        if found is None:
            continue
        ids, prefix, suffix = found
        itself = _itself(description)
        for text, ours in zip(texts, ids, strict=True):
            assert ours == itself.encode(text, add_special_tokens=False).ids, f"{case}: other ids"
            framed = itself.encode(text, add_special_tokens=True).ids
            assert [*prefix, *ours, *suffix] == framed, f"{case}: another frame"
    assert refused < CASES // 2
