"""Skipped documents: every problem that a document can have is counted by its reason."""

from __future__ import annotations

from pathlib import Path

from elastrata_pipelines.preparation import SourceConfig
from elastrata_pipelines.preparation.documents import read_documents
from elastrata_pipelines.preparation.portions import read_portions
from elastrata_pipelines.preparation.provenance import (
    OTHER,
    count_reasons,
    format_counts,
    sum_counts,
)
from elastrata_pipelines.preparation.sources import find_files

LINES = {
    b"not json": "not JSON",
    b"[1]": "not JSON",
    b'{"body": 1}': "no text field",
    b"{}": "no text field",
    b'{"text": 7}': "not text",
    b'{"text": null}': "not text",
    b'{"text": "\\ud800"}': "half of a surrogate pair",
    b'{"text": "\xff"}': "not UTF-8",
}


def test_every_problem_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES))
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    source = SourceConfig(paths=(str(tmp_path),))
    files = find_files(0, source).files
    (portion,) = read_portions(files, source, size=2**20, max_document_bytes=2**20)
    problems = read_documents(portion, source, max_document_bytes=2**20).problems
    reasons = [next(iter(count_reasons([problem]))) for problem in problems]
    assert reasons == [*LINES.values(), "not UTF-8"]
    assert OTHER not in reasons
    counts = sum_counts([count_reasons(problems), {"not JSON": 1000}])
    assert list(counts) == [
        "not JSON", "no text field", "not UTF-8", "not text", "half of a surrogate pair",
    ]  # fmt: skip
    assert format_counts(counts).startswith("1,002 not JSON, 2 no text field, ")
