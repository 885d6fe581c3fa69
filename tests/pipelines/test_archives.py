"""Archives and what is no text: each member is read as a file, and the rest is refused by name."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elastrata_pipelines.hashing import combine
from elastrata_pipelines.preparation import SourceConfig
from elastrata_pipelines.preparation.origins import find_origins
from elastrata_pipelines.preparation.provenance import PROVENANCE, Provenance
from elastrata_pipelines.storage import Storage
from support.archives import NO_TEXTS, PAGE, parquet, read, tar, zstd

TEXTS = {f"texts/{number}.txt": f"text {number} ünï\n" * (number + 1) for number in range(30)}


def encoded(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in texts.items()}


WAYS: dict[str, Callable[[bytes], bytes]] = {
    "a.tar": bytes,
    "a.tar.gz": gzip.compress,
    "a.tgz": gzip.compress,
    "a.tar.bz2": bz2.compress,
    "a.txz": lzma.compress,
    "a.tar.xz": lzma.compress,
    "a.tar.zst": zstd,
    "a.tzst": zstd,
    "subset00.xz": lzma.compress,  # as OpenWebText is published
    "a.txt.gz": gzip.compress,
}


@pytest.mark.parametrize("name", WAYS)
def test_each_member_is_a_document(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(WAYS[name](tar(encoded(TEXTS))))
    documents, problems, _ = read(tmp_path)
    assert [document.text for document in documents] == [*TEXTS.values()]
    assert problems == []
    assert [document.file for document in documents] == [f"{tmp_path}/{name}: {m}" for m in TEXTS]
    assert len({document.id for document in documents}) == len(TEXTS)
    for size in (100, 3000):
        for skip in (False, True):
            assert read(tmp_path, size=size, skip=skip) == (documents, [], 0)


def test_a_member_is_read_as_a_file_of_its_name(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(3))
    inner = lzma.compress(tar({"x.txt": b"deep 1", "y.txt.bz2": bz2.compress(b"deep 2")}))
    members = {
        "a.jsonl": lines,
        "b.jsonl.gz": gzip.compress(lines),
        "c.parquet": parquet("row 0", "row 1"),
        "d_data.xz": inner,
        "e.txt": b"last\nof all",
    }
    (tmp_path / "all.tar.gz").write_bytes(gzip.compress(tar(members)))
    (tmp_path / "b.parquet.zst").write_bytes(zstd(parquet("row 2")))
    documents, problems, _ = read(tmp_path, documents="line")
    assert problems == []
    assert [document.text for document in documents] == [
        *["line 0", "line 1", "line 2"] * 2, "row 0", "row 1", "deep 1", "deep 2", "last", "of all",
        "row 2",
    ]  # fmt: skip
    assert documents[9].file == f"{tmp_path}/all.tar.gz: d_data.xz: y.txt.bz2"


def sqlite(folder: Path) -> bytes:
    with sqlite3.connect(folder / "x.db") as database:
        database.execute("create table texts (text)")
    data = (folder / "x.db").read_bytes()
    (folder / "x.db").unlink()
    return data


@pytest.mark.parametrize("documents", ["file", "line"])
@pytest.mark.parametrize("name", [*NO_TEXTS, "sqlite"])
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, documents: str) -> None:
    data, what = NO_TEXTS[name] if name in NO_TEXTS else (sqlite(tmp_path), "an SQLite database")
    inside = {"no.txt": data, "yes.txt": b"fine"}
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.tar.xz").write_bytes(lzma.compress(tar(inside)))
    (tmp_path / "d.txt").write_bytes(b"fine")
    found, problems, _ = read(tmp_path, documents=documents)
    names = ["a.txt: ", "b.txt.gz: ", "c.tar.xz: no.txt: "]
    if name == "tar":  # it is read if its name says so, or in another file
        names, found = names[:1], found[2:]
    assert [document.text for document in found] == ["fine", "fine"]
    assert [line[: len(start)] for start, line in zip(names, problems, strict=True)] == names
    assert all(f"cannot be read ({what}" in line or what in line for line in problems)
    again = read(tmp_path, documents=documents, skip=True)
    assert again == (found if name != "tar" else again[0], [], len(names))


@pytest.mark.parametrize("what", ["lfs", "annex", "page", "error", "zip"])
def test_what_stands_in_the_place_of_a_file_is_called_what_it_is(tmp_path: Path, what: str) -> None:
    data, words = NO_TEXTS[what]
    names = ["a.jsonl.gz", "b.txt.bz2", "c.tar", "d.tgz", "e.parquet", "f.txt.xz", "g.txt.zst"]
    for name in names:
        (tmp_path / name).write_bytes(data)
    (tmp_path / "h.tar").write_bytes(tar({"i.jsonl.gz": data}))
    documents, problems, _ = read(tmp_path)
    assert documents == []
    assert [line.partition(f": cannot be read ({words}")[0] for line in problems] == [
        *names, "h.tar: i.jsonl.gz",
    ]  # fmt: skip
    assert read(tmp_path, skip=True) == ([], [], 8)


def test_html_is_text_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(PAGE)
    (tmp_path / "b.php.gz").write_bytes(gzip.compress(PAGE))
    documents, problems, _ = read(tmp_path)
    assert (len(documents), problems) == (2, [])
    (tmp_path / "c.jsonl").write_bytes(PAGE)
    (tmp_path / "d.txt").write_bytes(PAGE)
    _, problems, _ = read(tmp_path)
    assert [line.partition(": cannot be read (an HTML page")[0] for line in problems] == [
        "c.jsonl", "d.txt",
    ]  # fmt: skip
    assert len(read(tmp_path, format="text")[0]) == 4


def test_binary_data_after_text_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"some text\n" * 1000 + bytes(10**5))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "\0" * 50}), encoding="utf-8")
    (tmp_path / "c.parquet").write_bytes(parquet("\1\2" * 50, "fine"))
    documents, problems, _ = read(tmp_path)
    assert [document.text for document in documents] == ["fine"]
    assert [line.partition(": control characters")[0] for line in problems] == [
        "a.txt:1", "b.jsonl:1", "c.parquet:1",
    ]  # fmt: skip


WHOLE = tar(encoded(TEXTS))
END = len(WHOLE.rstrip(b"\0"))
HEADER = WHOLE.index(b"texts/7.txt")
DAMAGE = {
    "cut off in a member": WHOLE[: END - 10],
    "cut off before the end": WHOLE[: -(-END // 512) * 512],
    "cut off in a header": WHOLE[: HEADER + 200],
    "a header altered": WHOLE[:HEADER] + b"X" + WHOLE[HEADER + 1 :],
    "a second one after it": WHOLE + WHOLE,
    "none": b"this is text",
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_archive_is_told(tmp_path: Path, how: str, pack: Callable[..., bytes]) -> None:
    name = "a.tar" if pack is bytes else "a.tar.gz"
    (tmp_path / name).write_bytes(pack(DAMAGE[how]))
    (tmp_path / "b.txt").write_bytes(b"the last")
    _, problems, _ = read(tmp_path)
    assert problems
    assert all(line.startswith(f"{name}: ") for line in problems)
    for size in (100, 2**20):
        documents, problems, left_out = read(tmp_path, size=size, skip=True)
        assert [document.text for document in documents] == ["the last"]
        assert (problems, left_out) == ([], 1)


def test_archives_in_archives_end(tmp_path: Path) -> None:
    data = b"deep"
    for _ in range(6):
        data = gzip.compress(tar({"a.gz": data}))
    (tmp_path / "a.gz").write_bytes(data)
    documents, (problem,), _ = read(tmp_path)
    assert documents == []
    assert "archives in archives, more than 4 deep" in problem


def test_a_bomb_in_an_archive_is_defused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastrata_pipelines.preparation.pieces._FREE_EXPANSION_BYTES", 2**16)
    many = {f"{number}.txt": b"\n" * 10_000 for number in range(500)}
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(tar(many)))
    (tmp_path / "b.tar").write_bytes(tar({"b.gz": gzip.compress(b"a\n" * 2**22)}))
    _, problems, _ = read(tmp_path, limit=2**24)
    assert [line.partition(" (it unpacks to more than")[0] for line in problems] == [
        "a.tar.xz: cannot be read", "b.tar: b.gz: cannot be read",
    ]  # fmt: skip


def test_a_document_over_the_limit_is_named_by_its_member(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar({"long.txt": b"x" * 3000}))
    _, (problem,), _ = read(tmp_path, limit=1000)
    assert problem.startswith("a.tar: long.txt: the document that begins at line 1 is longer than")


def test_a_sample_of_a_member_is_traced_to_it(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.xz").write_bytes(lzma.compress(tar({"b.txt": b"one\ntwo\nthree"})))
    config = {"name": "s", "paths": [str(texts)], "documents": "line"}
    documents, _, _ = read(texts, documents="line")
    storage = Storage(str(tmp_path / "data"))
    said = SourceConfig.model_validate(config).model_dump(mode="json", exclude={"paths"})
    written = Provenance(configuration={"sources": [said]}, files={})
    storage.write(written.to_json(), PROVENANCE)
    ids = combine(np.array([documents[1].id], np.uint64), np.zeros(1, np.uint64))
    (sample,) = combine(ids, np.zeros(1, np.uint64)).tolist()
    manifest: Any = SimpleNamespace(pairs=None, packing="concat", seq_len=16)
    found = find_origins(storage, manifest, [sample], {"s": [str(texts)]})
    assert (found[sample].file, found[sample].line) == (f"{texts}/a.xz: b.txt", 2)
