"""`elastrata prepare`: from options and from a recipe to the same data set."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastrata.cli import main as cli
from elastrata.cli.main import run
from elastrata.cli.prepare import _from_recipe, _given
from elastrata_pipelines.preparation import PrepareConfig
from support.documented import documented_keys

RECIPE = """\
extends: bert/tiny
data:
  path: from-recipe
  prepare:
    sources: [{paths: text}]
    tokenizer: {train: bpe, vocab_size: 400, lowercase: false}
    seq_len: 32
    held_out: 0.2
"""


@pytest.mark.matrix  # two preparations
@pytest.mark.usefixtures("ray_local")
def test_options_and_a_recipe_make_the_same_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{number * k % 31}" for k in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(words, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    given = ("--tokenizer", "bpe", "--vocab-size", "400", "--seq-len", "32", "--held-out", "0.2")

    def prepared(*arguments: str) -> dict[str, Any]:
        assert run(["prepare", *arguments, "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return result

    first = prepared("--text", "text", *given, "--out", "from-options")
    second = prepared("mine.yaml")
    assert list(first) == documented_keys("prepare")
    assert first["path"] == str(tmp_path / "from-options")
    assert first["samples"] > 30
    assert second | {"path": "", "seconds": 0} == first | {"path": "", "seconds": 0}

    assert run(["prepare", "mine.yaml", "data.prepare.seq_len=16"]) == 2
    assert "--overwrite" in capsys.readouterr().err


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    return tmp_path


def _planned(*arguments: str, **options: Any) -> dict[str, PrepareConfig]:
    """What the command would prepare from a recipe with these options."""
    every = dict.fromkeys(("tokenizer", "vocab_size", "seq_len", "packing", "held_out"))
    return _from_recipe(list(arguments), None, _given(**{**every, **options}))


def test_options_change_what_a_recipe_says(recipe: Path) -> None:
    (config,) = _planned(
        "mine.yaml", seq_len=64, packing="concat", held_out=0.0, vocab_size=500
    ).values()
    assert (config.seq_len, config.packing, config.held_out) == (64, "concat", None)
    assert (config.tokenizer.train, config.tokenizer.vocab_size) == ("bpe", 500)
    assert config.sources[0].paths == ("text",)

    (config,) = _planned("mine.yaml", tokenizer="wordpiece").values()
    assert (config.tokenizer.train, config.seq_len) == ("wordpiece", 32)
    (config,) = _planned("mine.yaml", tokenizer="some/folder").values()
    assert (config.tokenizer.load, config.tokenizer.train) == ("some/folder", None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("mine.yaml", "--seq-len", "4"), "data.prepare.seq_len: 4: expected a whole number at le"),
        (("mine.yaml", "--packing", "some"), "data.prepare.packing: 'some': expected 'none'"),
        (("mine.yaml", "--held-out", "2"), "data.prepare.held_out: 2.0: expected a number above"),
        (
            ("mine.yaml", "--tokenizer", "folder", "--vocab-size", "400"),
            "data.prepare.tokenizer: vocab_size: only with train",
        ),
        (
            ("--text", "a", "--out", "b", "--tokenizer", "folder", "--vocab-size", "400"),
            "tokenizer: vocab_size: only with train",
        ),
        (("--text", "a", "--out", "b", "--packing", "some"), "packing: 'some': expected 'none'"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert cli.run(["prepare", *arguments]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert line in told[0]


def test_a_mistaken_path_is_told_before_anything_heavy_starts(tmp_path: Path) -> None:
    script = f"""
import sys
from elastrata.cli.main import run
print(run(["prepare", "--text", "{tmp_path}/nope", "--out", "{tmp_path}/out"]))
print([name for name in ("ray", "torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, encoding="utf-8"
    )
    assert done.stdout.splitlines()[-2:] == ["2", "[]"]
    assert done.stderr == f"{tmp_path}/nope: no such file or folder, or nothing in it\n"
    assert not (tmp_path / "out").exists()
