"""The quickstart, shortened: everything it promises is there, and a second run uses the first."""

from __future__ import annotations

from pathlib import Path

from elastrata.launch.quickstart import collect_corpus


def test_the_corpus_is_pythons_library_and_stays(tmp_path: Path) -> None:
    corpus = collect_corpus(tmp_path / "corpus")
    assert corpus.bytes > 1_000_000
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*.py")}
    assert len(written) == corpus.files
    assert tmp_path / "corpus" / "argparse.py" in written
    assert not (tmp_path / "corpus" / "test").exists()
    assert collect_corpus(tmp_path / "corpus") == corpus
    assert {path: path.stat().st_mtime_ns for path in written} == written
