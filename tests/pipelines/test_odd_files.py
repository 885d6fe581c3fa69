"""Odd files: text read as it is, or one line that says what is wrong; no hang, no raw exception."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.preparation import PrepareConfig, SourceConfig
from elastrata_pipelines.preparation.corpus import Corpus
from elastrata_pipelines.preparation.documents import read_documents
from elastrata_pipelines.preparation.local_files import open_regular
from elastrata_pipelines.preparation.portions import group_files, read_portions
from elastrata_pipelines.preparation.sources import find_files

LIMIT = 10**6


def source(*paths: Path | str, **settings: Any) -> SourceConfig:
    return SourceConfig.model_validate({"paths": [*map(str, paths)], "name": "s", **settings})


def read(config: SourceConfig, *, limit: int = LIMIT) -> tuple[list[str], list[str]]:
    """The texts of a source, and all lines about what could not be read."""
    found = find_files(0, config)
    texts: list[str] = []
    problems = [*found.problems, *found.others]
    for group in group_files(found.files, LIMIT):
        for portion in read_portions(group, config, size=LIMIT, max_document_bytes=limit):
            documents = read_documents(portion, config, max_document_bytes=limit)
            texts += [document.text for document in documents.documents]
            problems += [*documents.fatal, *documents.problems]
    assert all(line.isprintable() for line in problems)
    return texts, problems


def lines(config: SourceConfig, folder: Path) -> list[str]:
    texts, problems = read(config)
    assert texts == []
    return [line.replace(f"{folder}/", "./") for line in problems]


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a text and everything that is none."""
    folder = tmp_path / "odd"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("the text", encoding="utf-8")
    os.mkfifo(folder / "pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "gone.txt").symlink_to(folder / "nowhere")
    (folder / "one.txt").symlink_to(folder / "other.txt")
    (folder / "other.txt").symlink_to(folder / "one.txt")
    (folder / "deep" / "back").symlink_to(folder)
    (folder / "deep" / "above").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        with monkeypatch.context() as patch:
            patch.chdir(folder)  # the path of a socket has at most 107 bytes
            server.bind("socket.txt")
        yield folder


ODD_LINES = [
    "./gone.txt: a link to something that is not there",
    "./one.txt: a link that leads back to itself",
    "./other.txt: a link that leads back to itself",
    "./pipe.txt: a named pipe, expected a file",
    "./socket.txt: a socket, expected a file",
    "./zero.txt: a device, expected a file",
]


@pytest.mark.parametrize("pattern", ["", "/*"])
def test_only_regular_files_of_a_folder_are_read(odd: Path, pattern: str) -> None:
    texts, problems = read(source(f"{odd}{pattern}"))
    assert texts == ["the text"]
    assert [line.replace(f"{odd}/", "./") for line in problems] == ODD_LINES


def test_they_are_refused_or_counted_as_bad_documents_are(odd: Path) -> None:
    values = {"sources": [{"paths": [str(odd)]}], "tokenizer": {"train": "bpe"}, "seq_len": 32}
    with pytest.raises(UserError) as caught:
        Corpus.find(PrepareConfig.model_validate(values), lambda *_: None)
    advice = " (bad_documents: skip passes it over)"
    assert list(caught.value.problems) == [
        line.replace("./", f"{odd}/") + advice for line in ODD_LINES
    ]
    values["bad_documents"] = "skip"
    corpus = Corpus.find(PrepareConfig.model_validate(values), lambda *_: None)
    assert ([file.name for file in corpus.files], corpus.passed_over) == (["a.txt"], (6,))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("pipe.txt", "a named pipe, expected a file or folder"),
        ("socket.txt", "a socket, expected a file or folder"),
        ("zero.txt", "a device, expected a file or folder"),
        ("gone.txt", "a link to something that is not there"),
        ("one.txt", "a link that leads back to itself"),
        ("a.txt/below", "a part of its path is a file, expected a folder"),
    ],
)
def test_what_is_named_must_be_a_file(odd: Path, name: str, why: str) -> None:
    assert lines(source(odd / name), odd) == [f"./{name}: cannot be read ({why})"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(odd: Path) -> None:
    with pytest.raises(OSError, match="a named pipe, expected a file"):
        open_regular(str(odd / "pipe.txt"))


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    for folder in ("inside/b", "inside/c", "outside/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.txt").write_text(folder, encoding="utf-8")
    inside = tmp_path / "inside"
    (inside / "a").symlink_to(inside / "b")  # read as b
    (inside / "link").symlink_to(outside)
    (inside / "later").symlink_to(outside / "deep")
    (outside / "home").symlink_to(inside)
    found = find_files(0, source(inside))
    assert [file.name for file in found.files] == ["b/x.txt", "c/x.txt", "later/x.txt"]
    assert (found.problems, found.others) == ([], [])


NAMES = [
    "a::b.txt", "file::memory.txt", "what?.txt", "star*.txt", "[ab].txt", "100%.txt", "a b.txt",
    "hash#1.txt", "line\nbreak.txt", "\x1b[31mred.txt", "ünï.txt", "~.txt", "a:b.txt", "-x.txt",
    os.fsdecode(b"caf\xe9.txt"),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("this one", encoding="utf-8")
    (tmp_path / "sa.txt").write_text("what [ab].txt and the like would match", encoding="utf-8")
    texts, problems = read(source(tmp_path))
    assert sorted(texts) == ["this one", "what [ab].txt and the like would match"]
    assert problems == []
    if name.isprintable():  # a configuration holds no other text
        assert read(source(tmp_path / name)) == (["this one"], [])
        assert read(source(f"file://{tmp_path}/{name}")) == (["this one"], [])


def test_names_in_a_store_are_taken_as_they_are() -> None:
    store = fsspec.filesystem("memory")
    for name in ("a::b.txt", "star*.txt", "what?.txt"):
        store.pipe_file(f"/odd-names/{name}", b"this one")
    try:
        assert read(source("memory://odd-names")) == (["this one"] * 3, [])
    finally:
        store.rm("/odd-names", recursive=True)


def test_a_line_of_absurd_size_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "')
    config = source(tmp_path)
    (file,) = find_files(0, config).files
    os.truncate(tmp_path / "a.jsonl", 2**40)  # a terabyte of zeros that takes no room
    files = [replace(file, bytes=2**40)]
    (portion,) = read_portions(files, config, size=LIMIT, max_document_bytes=LIMIT)
    (problem,) = portion.problems
    assert "a.jsonl: the document that begins at line 1 is longer than" in problem


def write_parquet(path: Path, column: pa.Array, **options: Any) -> None:
    pq.write_table(pa.table({"text": column}), path, **options)


def not_utf8(*texts: bytes) -> pa.Array:
    """A column of strings that are none: Arrow checks them only where it is asked to."""
    return pa.array(texts, pa.binary()).view(pa.string())


def test_parquet_columns_that_are_no_text(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "a.parquet")
    write_parquet(tmp_path / "b.parquet", pa.array([{"a": "x"}]))
    write_parquet(tmp_path / "c.parquet", pa.array([["x"]]))
    write_parquet(tmp_path / "d.parquet", pa.array([b"x"]))
    many = pa.table({f"column {number}\n": [1] for number in range(100)})
    pq.write_table(many, tmp_path / "e.parquet")
    shown = ", ".join(f"column {number}\\n" for number in range(20))
    *told, last = lines(source(tmp_path), tmp_path)
    assert last.startswith(
        "./e.parquet: cannot be read (no column 'text' (text_field, --text-field); it has "
        f"{shown[:180]}"
    )
    assert told == [
        "./a.parquet: cannot be read (2 columns are named 'text' (text_field, --text-field); it "
        "has text, text)",
        "./b.parquet: cannot be read (column 'text' holds struct<a: string>, not text)",
        "./c.parquet: cannot be read (column 'text' holds list<element: string>, not text)",
        "./d.parquet: cannot be read (column 'text' holds binary, not text)",
    ]


def test_parquet_rows_that_hold_no_text_are_bad_documents(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", not_utf8(b"fine", b"caf\xe9", b"good"))
    write_parquet(tmp_path / "b.parquet", pa.array([None, "x", None]))
    texts, problems = read(source(tmp_path))
    assert texts == ["fine", "good", "x"]
    assert [line.replace(f"{tmp_path}/", "./") for line in problems] == [
        "./a.parquet: row 1: column 'text' is not UTF-8 (byte 3 of the text)",
        "./b.parquet: row 0: column 'text' is null",
        "./b.parquet: row 2: column 'text' is null",
    ]


def test_damaged_files_are_told_by_their_names(tmp_path: Path) -> None:
    """Bytes flipped or cut off anywhere in files of every kind: lines, or text, never more."""
    rng = random.Random(5)
    text = "".join(f"{rng.random()} is a number of a line\n" for _ in range(200))
    column = pa.array(text.splitlines())
    for codec in ("snappy", "zstd", "none"):
        write_parquet(
            tmp_path / f"{codec}.parquet", column, compression=codec, write_page_checksum=True
        )
    for ending, pack in ((".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)):
        (tmp_path / f"a.txt{ending}").write_bytes(pack(text.encode()))
        (tmp_path / f"a.parquet{ending}").write_bytes(
            pack((tmp_path / "none.parquet").read_bytes())
        )
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text.encode())
    (tmp_path / "a.txt.zst").write_bytes(sink.getvalue().to_pybytes())
    whole = sorted(path for path in tmp_path.iterdir())
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    told = 0
    for path in whole:
        data = path.read_bytes()
        for attempt in range(12):
            copy = bytearray(data[: rng.randrange(1, len(data))] if attempt % 3 == 0 else data)
            if attempt % 3:
                copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
            (damaged / path.name).write_bytes(copy)
            _, problems = read(source(damaged / path.name))
            assert all(line.startswith(f"{damaged}/{path.name}: ") for line in problems)
            told += bool(problems)
        (damaged / path.name).unlink()
    assert told > 6 * len(whole)


@pytest.mark.parametrize(
    ("ending", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_compressed_bomb_is_defused(
    tmp_path: Path, ending: str, pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastrata_pipelines.preparation.pieces._FREE_EXPANSION_BYTES", 2**16)
    (tmp_path / f"a.txt{ending}").write_bytes(pack(b"\n" * 2**24))
    config = source(tmp_path, documents="line")
    (file,) = find_files(0, config).files
    portions = list(read_portions([file], config, size=LIMIT, max_document_bytes=LIMIT))
    (problem,) = [line for portion in portions for line in portion.problems]
    assert "a.txt" in problem
    assert "it unpacks to more than" in problem
    assert sum(portion.bytes for portion in portions) < 2**16 + 200 * file.bytes + 2 * LIMIT
