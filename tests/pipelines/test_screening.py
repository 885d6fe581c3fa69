"""Screening: filters and duplicates, counted by reason, the same however the work is divided."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.deduplication import (
    PERMUTATIONS,
    find_duplicates,
    find_near_duplicates,
    hash_text,
)
from elastrata_pipelines.preparation.filters import FilterConfig, Filters, check_filters
from support.texts import plain_text

TOKENIZER = {"train": "wordpiece", "vocab_size": 400}


def make(out: Path, texts: Sequence[str], **changes: Any) -> Manifest:
    """Prepares one document per text."""
    corpus = out.parent / f"{out.name}.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    values = {
        "sources": [{"paths": [str(corpus)], "name": "texts"}],
        "tokenizer": TOKENIZER, "seq_len": 256, "stripe_size": 64,
    }  # fmt: skip
    return prepare(PrepareConfig.model_validate({**values, **changes}), str(out))


def left_out(manifest: Manifest) -> object:
    return manifest.sources[0].documents_skipped


def reasons(config: dict[str, Any], texts: Sequence[str]) -> list[str | None]:
    ask = Filters([FilterConfig.model_validate(config)], "any")
    return [verdict and verdict.reason for verdict in map(ask, texts)]


def test_filters_by_expression_may_use_what_is_offered() -> None:
    expression = "sum(len(word) for word in text.split()) > 4 and not re.search('x{3}', text)"
    found = reasons({"expression": expression}, ["a b", "abc de", "abcdexxx"])
    assert found == [f"not {expression[:60]}...", None, f"not {expression[:60]}..."]


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"expression": "len(txt) > 3"}, "unknown name 'txt' (did you mean 'text'?)"),
        ({"expression": "len(text"}, "not a Python expression"),
        ({"expression": "x = 3"}, "not a Python expression"),
        ({"expression": "open('f')"}, "unknown name 'open'"),
        ({"expression": "text.__class__"}, "names that begin with _ are not offered"),
        ({}, "needs min_characters, max_characters, an expression, or a function"),
        ({"expression": "text", "function": "f"}, "needs either an expression or a function"),
        ({"min_characters": 3, "max_characters": 2}, "expected at most max_characters (2)"),
    ],
)
def test_filters_that_cannot_work_are_told(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError) as raised:
        FilterConfig.model_validate(config)
    assert line in str(raised.value)


def test_a_filter_for_a_source_that_is_not_there_is_told() -> None:
    values = {"sources": [{"paths": "a", "name": "texts"}], "tokenizer": TOKENIZER, "seq_len": 32}
    wrong = {**values, "filters": [{"min_characters": 2, "sources": ["text"]}]}
    with pytest.raises(ValidationError, match=r"filters\.0\.sources: text: expected one of texts"):
        PrepareConfig.model_validate(wrong)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with filters, installed as pip would."""
    (tmp_path / "our_filters.py").write_text(
        "def short(text):\n    return len(text) < 9\n\nnothing = 3\n", encoding="utf-8"
    )
    info = tmp_path / "our_filters-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: our-filters\nVersion: 1\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[elastrata.filters]\nshort = our_filters:short\nnothing = our_filters:nothing\n"
        "broken = our_filters:missing\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("our_filters", None)


def test_filters_of_other_packages_are_entry_points(installed: None) -> None:
    assert reasons({"function": "short"}, ["short", "not so short"]) == [None, "not short"]


def test_functions_that_are_not_there_are_told_at_once(installed: None) -> None:
    configs = [FilterConfig(function=name) for name in ("shrot", "nothing", "broken")]
    with pytest.raises(UserError) as raised:
        check_filters(configs)
    told = raised.value.problems
    assert len(told) == 3
    assert "installed: broken, nothing, short (did you mean 'short'?)" in told[0]
    assert told[1].startswith("filters.1.function: nothing: our_filters:nothing: expected")
    assert told[2].startswith("filters.2.function: broken: cannot be imported (AttributeError")


def test_what_differs_in_form_alone_is_a_duplicate() -> None:
    same = ["A ﬁne day.", "a fine\n  day.", " A FINE\u00a0DAY. "]
    assert len({hash_text(text) for text in same}) == 1
    assert hash_text("a fine day") != hash_text(same[0])


@given(st.lists(st.integers(0, 9)))
def test_the_first_of_equal_documents_stays(values: list[int]) -> None:
    flags = find_duplicates(np.array(values, np.uint64))
    assert flags.tolist() == [value in values[:place] for place, value in enumerate(values)]


def _near(rng: np.random.Generator, signature: Any, share: float) -> Any:
    """A signature that has that share of another one's hashes."""
    other = signature.copy()
    places = rng.permutation(PERMUTATIONS)[: round((1 - share) * PERMUTATIONS)]
    other[places] = rng.integers(0, 2**32, len(places), dtype=np.uint32)
    return other


def test_near_duplicates_of_one_that_stays_go_and_others_stay() -> None:
    """Of 300 documents a second version with 0.95 of the first, a third with 0.95 of the second,
    and one with 0.6, which is none."""
    rng = np.random.default_rng(0)
    firsts = rng.integers(0, 2**32, (300, PERMUTATIONS), dtype=np.uint32)
    seconds = np.array([_near(rng, one, 0.95) for one in firsts])
    thirds = np.array([_near(rng, one, 0.95) for one in seconds])
    others = np.array([_near(rng, one, 0.6) for one in firsts])
    flags = find_near_duplicates(np.concatenate([firsts, seconds, thirds, others]), 0.8)
    assert flags.reshape(4, 300).sum(axis=1).tolist() == [0, 300, 300, 0]


def test_near_duplicates_need_their_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything starts."""
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match=r"rensa is not installed: pip install rensa"):
        make(tmp_path / "out", ["some text"], deduplication={"method": "near"})
    assert not (tmp_path / "out").exists()


def test_what_does_not_stay_is_counted_by_reason(tmp_path: Path, ray_local: None) -> None:
    """And is in no sample; the tokenizer has not seen it either."""
    texts = [plain_text(seed, 600) for seed in range(60)]
    given = [*texts, *(text.upper() for text in texts[:7]), "tiny", texts[0], "xxx " * 90, "tiny"]
    filters = [{"min_characters": 20}, {"expression": "'xxx' not in text", "name": "x"}]
    found = make(
        tmp_path / "out", given, filters=filters, deduplication={"method": "exact"}, held_out=0.2
    )
    assert left_out(found) == {"duplicate": 8, "shorter than 20 characters": 2, "x": 1}
    alone = make(tmp_path / "alone", texts, held_out=0.2)
    for field in ("samples", "tokens", "tokenizer_fingerprint"):
        assert getattr(found, field) == getattr(alone, field)
    assert left_out(alone) == {}


def test_filters_that_fail_name_the_document(tmp_path: Path, ray_local: None) -> None:
    texts = [plain_text(seed, 200) for seed in range(20)] + ["no such word"]
    filters = [{"expression": "1 / text.count('. ') >= 0"}]
    for text in range(20):
        texts[text] += ". More. "
    with pytest.raises(UserError, match=r"out.jsonl:21: filters.0: ZeroDivisionError: division"):
        make(tmp_path / "out", texts, filters=filters)
    found = make(tmp_path / "out", texts, filters=filters, bad_documents="skip")
    assert left_out(found) == {"filter failed": 1}
