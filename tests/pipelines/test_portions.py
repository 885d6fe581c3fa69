"""Portions: however the files are cut, and however they are stored, the documents are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.documents import Document, read_documents
from elastrata_pipelines.preparation.portions import group_files, read_portions
from elastrata_pipelines.preparation.sources import find_files

LIMIT = 10**6


def documents(path: Path, size: int, **source: Any) -> list[Document]:
    config = SourceConfig.model_validate({"paths": [str(path)], "name": "s", **source})
    files = find_files(0, config)
    assert (files.problems, files.others) == ([], [])
    found: list[Document] = []
    for group in group_files(files.files, size):
        for portion in read_portions(group, config, size=size, max_document_bytes=LIMIT):
            read = read_documents(portion, config, max_document_bytes=LIMIT)
            assert (read.problems, read.fatal) == ([], ())
            found += read.documents
    return found


WAYS = [
    {"documents": "file"},
    {"documents": "line"},
    {"documents": "paragraph"},
    {"document_start": "#"},
]
lines = st.lists(st.sampled_from(["", " ", "a", "# b", "ü" * 7, "\t", "c" * 40]), min_size=1)


@pytest.mark.parametrize("way", WAYS)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(lines=lines, ending=st.sampled_from(["\n", "\r\n"]))
def test_cutting_elsewhere_changes_no_document(
    way: dict[str, str], lines: list[str], ending: str, tmp_path: Path
) -> None:
    text = ending.join(lines)
    if not text.strip():
        return
    (tmp_path / "a.txt").write_bytes(text.encode())
    whole = documents(tmp_path / "a.txt", LIMIT, **way)
    assert "".join("".join(found.text for found in whole).split()) == "".join(text.split())
    for size in (8, 64):
        assert documents(tmp_path / "a.txt", size, **way) == whole


def test_parquet_rows(tmp_path: Path) -> None:
    texts = [f"row {number} ü" for number in range(1000)]
    column = pa.chunked_array([texts[:300], texts[300:]]).dictionary_encode()
    pq.write_table(pa.table({"body": column}), tmp_path / "a.parquet", row_group_size=170)
    found = documents(tmp_path, 500, text_field="body")
    assert [document.text for document in found] == texts


def test_moving_a_corpus_leaves_its_identities_alone(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "one", tmp_path / "two" / "deeper"):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a.txt").write_text("x\ny\n", encoding="utf-8")
        (folder / "b.txt").write_text("z", encoding="utf-8")
        (folder / ".hidden").write_text("not this", encoding="utf-8")
        found.append(documents(folder, LIMIT))
    assert [replace(document, file="") for document in found[0]] == [
        replace(document, file="") for document in found[1]
    ]
    assert [document.text for document in found[0]] == ["z", "x\ny\n"]


def test_files_are_found_by_glob_once(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    config = SourceConfig(paths=(f"{tmp_path}/*.txt", str(tmp_path), f"{tmp_path}/a.txt"))
    found = find_files(0, config)
    assert [file.name for file in found.files] == ["a.txt", "c.txt", "b.md"]
    assert found.problems == []
