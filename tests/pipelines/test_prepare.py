"""`prepare`: from text to a data set that holds all of it, in its order, once."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.inspection import verify
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.preparation.target import KEPT_TOKENIZER, load_kept_tokenizer
from elastrata_pipelines.storage import Storage
from support.corpus import whole_config, write_corpus
from support.texts import plain_text

pytestmark = pytest.mark.usefixtures("ray_local")

WORDPIECE = {"train": "wordpiece", "vocab_size": 400}


def make(out: Path, texts: list[str], **changes: Any) -> Manifest:
    """Prepares one document per text."""
    corpus = out.parent / f"{out.name}.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    values = {
        "sources": [{"paths": [str(corpus)], "name": "texts"}],
        "tokenizer": WORDPIECE,
        "seq_len": 32,
        "stripe_size": 64,
        "stripes_per_shard": 2,
    }
    return prepare(PrepareConfig.model_validate({**values, **changes}), str(out))


def table(out: Path) -> pa.Table:
    """All stripes of a data set."""
    storage = Storage(str(out))
    manifest = Manifest.read(storage)
    return pa.concat_tables(read_stripes(storage, manifest, range(manifest.stripes)))


def samples(out: Path) -> list[list[int]]:
    dtype = Manifest.read(Storage(str(out))).token_dtype
    return [np.frombuffer(row, dtype).tolist() for row in table(out).column("tokens").to_pylist()]


def decoded(out: Path) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in samples(out)]


def texts(count: int, size: int = 60) -> list[str]:
    return [plain_text(seed, size).lower() for seed in range(count)]


def test_every_document_is_there_once(tmp_path: Path) -> None:
    wanted = texts(500)
    manifest = make(tmp_path / "out", wanted, seq_len=128)
    squeezed = Counter("".join(text.split()) for text in decoded(tmp_path / "out"))
    assert squeezed == Counter("".join(text.split()) for text in wanted)
    assert (manifest.samples, manifest.stripes) == (500, 8)
    assert [entry.stripes for entry in manifest.shards] == [2, 2, 2, 2]
    assert verify(Storage(str(tmp_path / "out"))) == []


def test_stripes_are_presorted_and_alike(tmp_path: Path) -> None:
    make(tmp_path / "out", [plain_text(seed, 10 + seed % 90) for seed in range(640)], seq_len=512)
    lengths = table(tmp_path / "out").column("length").to_numpy()
    stripes = lengths.reshape(10, 64)
    assert np.all(np.diff(stripes, axis=1) <= 0)
    assert np.ptp(stripes.sum(axis=1)) < 0.06 * stripes.sum(axis=1).mean()


def test_long_documents_are_cut_and_framed(tmp_path: Path) -> None:
    make(tmp_path / "out", texts(20, 700))
    found = samples(tmp_path / "out")
    assert max(map(len, found)) == 32
    assert {(ids[0], ids[-1]) for ids in found} == {(2, 3)}


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_packed_samples_keep_their_boundaries(tmp_path: Path, packing: str) -> None:
    manifest = make(tmp_path / "out", texts(300), packing=packing, seq_len=100)
    assert manifest.packing == packing
    found = table(tmp_path / "out")
    assert manifest.tokens > 0.85 * 100 * manifest.samples
    for ids, row in zip(
        samples(tmp_path / "out"), found.column("boundaries").to_pylist(), strict=True
    ):
        starts = np.frombuffer(row, "<i4").tolist()
        assert [0, *starts] == [place for place, token in enumerate(ids) if token == 2]


def test_pairs(tmp_path: Path) -> None:
    manifest = make(tmp_path / "out", [plain_text(seed, 900) for seed in range(100)], pairs=True)
    found = table(tmp_path / "out")
    assert manifest.pairs
    assert 0.35 < np.mean(found.column("is_next").to_numpy()) < 0.65
    for ids, start in zip(
        samples(tmp_path / "out"), found.column("second_start").to_pylist(), strict=True
    ):
        assert (ids[0], ids[start - 1], ids[-1]) == (2, 3, 3)
        assert ids.count(3) == 2


def test_weights_repeat_and_thin_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {text}"}) for text in texts(400, 30)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    manifest = make(
        tmp_path / "out", [],
        sources=[
            {"paths": [str(tmp_path / "a.jsonl")], "weight": 2.5},
            {"paths": [str(tmp_path / "b.jsonl")], "weight": 0.5},
        ],
        seq_len=128,
    )  # fmt: skip
    first, second = manifest.sources
    assert 900 < first.samples < 1100
    assert 150 < second.samples < 250
    counts = Counter(decoded(tmp_path / "out"))
    assert {count for text, count in counts.items() if text.startswith("a ")} == {2, 3}
    assert {count for text, count in counts.items() if text.startswith("b ")} == {1}
    ids = table(tmp_path / "out").column("sample_id").to_pylist()
    assert len(set(ids)) == manifest.samples


def test_equal_documents_are_held_out_together(tmp_path: Path) -> None:
    wanted = texts(400)
    manifest = make(tmp_path / "out", wanted * 3, held_out=0.2, seq_len=128)
    held_out = Manifest.read(Storage(str(tmp_path / "out" / "held_out")))
    train, test = decoded(tmp_path / "out"), decoded(tmp_path / "out" / "held_out")
    assert not set(train) & set(test)
    assert manifest.samples + held_out.samples == 1200
    assert 0.12 < held_out.samples / 1200 < 0.28
    assert held_out.tokenizer_fingerprint == manifest.tokenizer_fingerprint


def test_held_out_sources(tmp_path: Path) -> None:
    (tmp_path / "test.txt").write_text("\n".join(texts(30)), encoding="utf-8")
    source = {"paths": [str(tmp_path / "test.txt")], "documents": "line"}
    manifest = make(tmp_path / "out", texts(50), held_out=[source], seq_len=128)
    held_out = Manifest.read(Storage(str(tmp_path / "out" / "held_out")))
    assert (manifest.samples, held_out.samples) == (50, 30)


def test_every_format_holds_the_same_documents(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    manifest = prepare(
        PrepareConfig.model_validate(whole_config(str(corpus))), str(tmp_path / "out")
    )
    (source,) = manifest.sources
    held_out = Manifest.read(Storage(str(tmp_path / "out" / "held_out")))
    documents = 12 + 600 + 30 + 300
    assert source.documents + held_out.sources[0].documents == documents
    assert source.samples == manifest.samples
    assert verify(Storage(str(tmp_path / "out"))) == []


def test_a_regular_expression_begins_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(
        "".join(f" = Title {n} = \n\n text {n} \n = = part = = \n more\n" for n in range(40)),
        encoding="utf-8",
    )
    source = {"paths": [str(tmp_path / "a.txt")], "document_start": " = [^=]"}
    make(tmp_path / "out", [], sources=[source], seq_len=64)
    assert sorted(decoded(tmp_path / "out"))[0] == "= Title 0 = text 0 = = part = = more"
    assert len(decoded(tmp_path / "out")) == 40


def test_preparing_again(tmp_path: Path) -> None:
    stages: list[str] = []
    first = make(tmp_path / "out", texts(50))
    config = PrepareConfig.model_validate({
        "sources": [{"paths": [str(tmp_path / "out.jsonl")], "name": "texts"}],
        "tokenizer": WORDPIECE, "seq_len": 32, "stripe_size": 64, "stripes_per_shard": 2,
    })  # fmt: skip
    again = prepare(config, str(tmp_path / "out"), progress=lambda stage, *_: stages.append(stage))
    assert again == first
    assert stages == ["already prepared"]

    other = config.model_copy(update={"seq_len": 64})
    with pytest.raises(UserError, match="made with another configuration or from other") as caught:
        prepare(other, str(tmp_path / "out"))
    assert caught.value.problems[1:] == (f"{tmp_path / 'out'}: seq_len: 32, now 64",)
    assert Manifest.read(Storage(str(tmp_path / "out"))) == first
    replaced = prepare(other, str(tmp_path / "out"), overwrite=True)
    assert replaced.seq_len == 64
    assert verify(Storage(str(tmp_path / "out"))) == []


def test_an_interrupted_preparation_keeps_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(texts(50)), encoding="utf-8")
    source = {"paths": [str(tmp_path / "a.txt")], "documents": "line"}
    config = PrepareConfig.model_validate({
        "sources": [source], "tokenizer": WORDPIECE, "seq_len": 32,
    })  # fmt: skip
    out, whole = str(tmp_path / "out"), str(tmp_path / "whole")

    def interrupt(stage: str, *_: object) -> None:
        if stage == "tokenize":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(config, out, progress=interrupt)
    assert Storage(out).names() == [KEPT_TOKENIZER]
    kept = Storage(out).read(KEPT_TOKENIZER)

    stages: list[str] = []
    first = prepare(config, out, progress=lambda stage, *_: stages.append(stage))
    assert stages[0] == "take the tokenizer trained before"
    assert not {"read text for the tokenizer", "train the tokenizer"} & set(stages)
    assert first == prepare(config, whole)
    assert Storage(out).names() == Storage(whole).names()

    for damaged in (kept[:-20], kept.replace(b"version", b"venison", 1), b"[]"):
        Storage(whole).write(damaged, KEPT_TOKENIZER)
        assert load_kept_tokenizer(Storage(whole), first.preparation) is None
    Storage(whole).write(kept, KEPT_TOKENIZER)
    assert load_kept_tokenizer(Storage(whole), first.preparation)
    assert load_kept_tokenizer(Storage(whole), "0" * 64) is None


def test_mistakes_are_found_before_the_session_begins(tmp_path: Path) -> None:
    def session() -> AbstractContextManager[None]:
        raise AssertionError("not yet")

    source = {"paths": [str(tmp_path / "missing.txt")]}
    values = {"sources": [source], "tokenizer": WORDPIECE, "seq_len": 32}
    with pytest.raises(UserError, match=r"missing.txt: no such file or folder"):
        prepare(PrepareConfig.model_validate(values), str(tmp_path / "out"), session=session)
    (tmp_path / "missing.txt").write_text("text", encoding="utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="holds other files"):
        prepare(PrepareConfig.model_validate(values), str(tmp_path / "out"), session=session)


def test_a_failed_overwrite_leaves_the_data_set(tmp_path: Path) -> None:
    first = make(tmp_path / "out", texts(50))
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    values = whole_config(str(tmp_path / "bad.txt"))
    with pytest.raises(UserError, match="not UTF-8"):
        prepare(PrepareConfig.model_validate(values), str(tmp_path / "out"), overwrite=True)
    assert Manifest.read(Storage(str(tmp_path / "out"))) == first
    assert verify(Storage(str(tmp_path / "out"))) == []
    assert not (tmp_path / "out" / ".building").exists()
