"""The README's lines from one's own text to a model, as they stand there, on a little text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from support.command import run
from support.texts import plain_text

ROOT = Path(__file__).parents[2]
SHORT = {
    "train": ["tokens=40_000", "evaluation.samples=32", "schedule={warmup_steps: 1}"],
    "generate": ["--tokens", "8"],
}
"""What makes a command short; all else is the README's own."""


def _lines() -> list[list[str]]:
    section = (
        (ROOT / "README.md").read_text().split("## Your own text\n")[1].split("Or all of it")[0]
    )
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_from_ones_own_text_to_a_bert_and_a_gpt(tmp_path: Path) -> None:
    texts = tmp_path / "my" / "texts"
    texts.mkdir(parents=True)
    for number in range(40):
        (texts / f"{number}.txt").write_text(plain_text(number, 6000))
    commands = _lines()
    assert [command[1] for command in commands] == [
        *("prepare", "train", "export"),
        *("prepare", "train", "generate"),
    ]
    for program, command, *arguments in commands:
        assert program == "elastrata"
        done = run(command, *arguments, *SHORT.get(command, []), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "models" / "first" / "config.json").is_file()
    assert done.stdout.startswith("Once upon a time")
