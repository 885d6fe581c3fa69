"""The tutorial, typed from top to bottom: its command lines as they are, and fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.documented import TUTORIAL
from support.texts import plain_text

FEW = {
    "steps: 400": "steps: 8",
    "steps: 300": "steps: 4",
    "changes: {steps: 100": "changes: {steps: 4",
    "warmup_steps: 40": "warmup_steps: 2",
    "warmup_steps: 10,": "warmup_steps: 1,",
    "every: 100": "every: 4",
    "every: 20": "every: 2",
    "trials: 6": "trials: 2",
}
"""The numbers that make its runs long, and those that the test puts in their place."""
_BLOCK = re.compile(r"^```(sh|yaml|python)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def test_the_first_hour(tmp_path: Path) -> None:
    texts = tmp_path / "my" / "texts"
    texts.mkdir(parents=True)
    for number in range(200):
        (texts / f"{number}.txt").write_text(plain_text(number, 600), encoding="utf-8")
    page = TUTORIAL.read_text(encoding="utf-8")
    assert [number for number in FEW if number not in page] == []
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    shown = ""
    for language, block in _BLOCK.findall(page):
        if language == "yaml":
            name = block.split()[1]
            for there, here in FEW.items():
                block = block.replace(there, here)
            (tmp_path / name).write_text(block, encoding="utf-8")
            continue
        arguments = ["bash", "-ec"] if language == "sh" else [sys.executable, "-c"]
        done = subprocess.run(
            [*arguments, block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        shown += done.stdout
    assert "equal: the same steps, with the same samples in each" in shown
    for made in ("runs/first/plots/loss-curve.png", "runs/lr/report.html"):
        assert (tmp_path / made).is_file(), made
