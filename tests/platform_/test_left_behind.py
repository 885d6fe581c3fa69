"""Tests that are killed leave nothing running."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import wait_until
from support.marks import marked

TESTS = Path(__file__).parents[1]
KILLED = """
import os, signal, subprocess, sys
from support.command import wait_until
from support.marks import OURS, marked

def test_that_is_killed({fixture}):
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    # A program that has just begun has no variables yet, for a moment.
    wait_until(lambda: len(list(marked(OURS))) >= {least}, 240, "marked processes")
    print("\\nmark", OURS, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("fixture", "least"),
    [("tmp_path", 1), pytest.param("ray_local", 6, marks=pytest.mark.matrix)],
)
def test_nothing_that_a_killed_test_started_is_left(
    fixture: str, least: int, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(
        (TESTS / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    (tmp_path / "test_killed.py").write_text(
        KILLED.format(fixture=fixture, least=least), encoding="utf-8"
    )
    settings = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", tmp_path]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *settings, tmp_path],
        stdout=subprocess.PIPE,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == -9, done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("mark "))
    ours = line.split()[1]
    wait_until(lambda: not list(marked(ours)), 240, "the ends of all")
