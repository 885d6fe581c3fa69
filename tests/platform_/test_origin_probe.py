"""Packages told apart by hidden states: from other files than those that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrata.cli.main import run as run_here
from elastrata.inference.origin_probe import ASKED, KNOWN, PACKAGES, probe, texts_of
from support.small_gpt import run_with_tokenizer
from support.synthetic import MODERNBERT

BERT = {"name": "bert", "hidden_size": 32, "num_layers": 1, "num_heads": 2, "max_positions": 48}
WORDS = ["fire", "ice", "sand", "snow", "wind", "heat", "rain", "dust", "mist", "hail"]


def _corpus(folder: Path, packages: int = PACKAGES + 1) -> Path:
    """Packages of paragraphs that have a word of their own, and one with too little text."""
    for number in range(packages):
        package = folder / f"package{number}"
        package.mkdir(parents=True)
        for file in range(2 * (KNOWN // 10)):
            text = f"Some say the world will end in {WORDS[number]}. " * 3
            paragraphs = (f"{text}{number} {file} {place}" for place in range(20))
            (package / f"file{file:02}.py").write_text("\n\n".join(paragraphs), encoding="utf-8")
    (folder / "package0a").mkdir()
    (folder / "package0a" / "short.py").write_text("Some say " * 20, encoding="utf-8")
    return folder


def test_what_is_asked_for_is_from_other_files(tmp_path: Path) -> None:
    found = texts_of(_corpus(tmp_path))
    assert found is not None
    known, asked = found
    assert [len(known), len(asked)] == [PACKAGES * KNOWN, PACKAGES * ASKED]
    assert {number for _, number in known} == {number for _, number in asked} == set(range(8))
    files = [{tuple(text.split()[-3:-1]) for text, _ in texts} for texts in found]
    assert not files[0] & files[1]
    assert texts_of(_corpus(tmp_path / "few", packages=PACKAGES - 1)) is None


@pytest.mark.parametrize("workload", [BERT, MODERNBERT], ids=["bert", "modernbert"])
def test_a_word_of_its_own_gives_a_package_away(
    workload: dict[str, object], tmp_path: Path
) -> None:
    run = run_with_tokenizer(tmp_path, "wordpiece", workload=workload)
    assert run_here(["export", str(run), "--out", str(tmp_path / "model")]) == 0
    found = probe(tmp_path / "model", _corpus(tmp_path / "corpus"))
    assert found is not None
    assert found.chance == 1 / PACKAGES
    assert found.trained > 0.9
    assert found.untrained > 0.9
