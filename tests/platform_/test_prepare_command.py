"""`elastrata prepare`: from options and from a recipe to the same data set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.command import run, run_json
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


def test_options_and_a_recipe_make_the_same_data_set(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(40):
        words = " ".join(f"word{number * k % 31}" for k in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    given = ("--tokenizer", "bpe", "--vocab-size", 400, "--seq-len", 32, "--held-out", 0.2)
    first = run_json("prepare", "--text", "text", *given, "--out", "from-options", cwd=tmp_path)
    second = run_json("prepare", "mine.yaml", cwd=tmp_path)
    assert list(first) == documented_keys("prepare")
    assert first["path"] == str(tmp_path / "from-options")
    assert first["samples"] > 30
    assert second | {"path": "", "seconds": 0} == first | {"path": "", "seconds": 0}

    refused = run("prepare", "mine.yaml", "data.prepare.seq_len=16", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--overwrite" in refused.stderr


def test_a_mistaken_path_is_told_before_anything_heavy_starts(tmp_path: Path) -> None:
    script = f"""
import sys
from elastrata.cli import run
print(run(["prepare", "--text", "{tmp_path}/nope", "--out", "{tmp_path}/out"]))
print([name for name in ("ray", "torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-2:] == ["2", "[]"]
    assert done.stderr == f"{tmp_path}/nope: no such file or folder, or nothing in it\n"
    assert not (tmp_path / "out").exists()
