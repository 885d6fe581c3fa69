"""The notebooks: executed as they are, but for their sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "workloads" / "notebooks"
SMALL = {
    "STEPS": "24",
    "TRIALS": "3",
    "TOP_STEPS": "20",
    "BATCH_SIZES": "(16, 32)",
    "TRAINED_SAMPLES": "16 * 24",
}
"""Values of the constants at the top."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    text = path.read_text()
    for name, value in SMALL.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    notebook = jupytext.reads(text, fmt="py:percent")
    nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
