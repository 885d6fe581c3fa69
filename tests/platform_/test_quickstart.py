"""The quickstart, shortened: everything it promises is there, and a second run uses the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from elastrata.launch.quickstart import collect_corpus
from support.command import run_json
from support.documented import documented_keys

SHORT = (
    "steps=4",
    "batch_size=8",
    "schedule.warmup_steps=1",
    "evaluation.samples=16",
    "data.prepare.tokenizer.max_bytes=200000",
)


@pytest.mark.matrix  # a run of two workers
def test_a_modernbert_is_trained_as_well(tmp_path: Path) -> None:
    command = ("quickstart", "--model", "modernbert", *SHORT, "--out", "q")
    result = run_json(*command, cwd=tmp_path)
    assert list(result) == [*documented_keys("train"), *documented_keys("quickstart")]
    assert (result["status"], result["steps"], result["world_sizes"]) == ("FINISHED", 4, [2])
    model = AutoModelForMaskedLM.from_pretrained(result["model"])
    assert type(model).__name__ == "ModernBertForMaskedLM"
    assert all(len(guess["words"]) == 3 for guess in result["filled"])
    assert (tmp_path / "q" / "modernbert-data" / "manifest.json").exists()


def test_the_corpus_is_pythons_library_and_stays(tmp_path: Path) -> None:
    corpus = collect_corpus(tmp_path / "corpus")
    assert corpus.bytes > 1_000_000
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "corpus").rglob("*.py")}
    assert len(written) == corpus.files
    assert tmp_path / "corpus" / "argparse.py" in written
    assert not (tmp_path / "corpus" / "test").exists()
    assert collect_corpus(tmp_path / "corpus") == corpus
    assert {path: path.stat().st_mtime_ns for path in written} == written
