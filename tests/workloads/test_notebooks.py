"""The notebooks: executed as they are, but for their sizes; and what progress looks like in one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.texts import plain_text

NOTEBOOKS = Path(__file__).parents[2] / "workloads" / "notebooks"
SMALL = {
    "STEPS": "24",
    "TRIALS": "3",
    "TOP_STEPS": "20",
    "BATCH_SIZES": "(16, 32)",
    "TRAINED_SAMPLES": "16 * 24",
}
"""Values of the constants at the top."""
OF_ONES_OWN = """\
# %%
import elastrata
from elastrata.driver.ray_session import ray_session

recipe = elastrata.load_recipe("bert/tiny", [
    "name=first", "data.path=data", "steps=40", "batch_size=8", "schedule.warmup_steps=1",
    "data.prepare={sources: [{paths: texts}], seq_len: 32, held_out: 0.1}",
    "data.prepare.tokenizer={train: wordpiece, vocab_size: 400}",
    "workers={threads: 1, spares: false}",
])
session = ray_session("local", num_cpus=2)
session.__enter__()
# %%
elastrata.prepare(recipe.data.prepare, "data")
# %%
result = elastrata.train(recipe)
# %%
result
# %%
session.__exit__(None, None, None)
"""


def _executed(text: str, folder: Path) -> list[list[dict[str, Any]]]:
    """The outputs of the cells of a notebook. None has what a terminal would make of it."""
    jupytext = pytest.importorskip("jupytext")
    nbclient = pytest.importorskip("nbclient")
    notebook = jupytext.reads(text, fmt="py:percent")
    nbclient.NotebookClient(
        notebook, timeout=500, resources={"metadata": {"path": str(folder)}}
    ).execute()
    cells = [cell.get("outputs", []) for cell in notebook.cells if cell.cell_type == "code"]
    for outputs in cells:
        assert "\\x1b" not in str(outputs)  # as `str` shows an escape
        assert [output for output in outputs if output.get("name") == "stderr"] == []
        assert sum(_is_live(output) for output in outputs) <= 1
        assert len(_lines(outputs)) < 30
    return cells


def _is_live(output: dict[str, Any]) -> bool:
    return output["output_type"] == "display_data" and "text/html" in output["data"]


def _lines(outputs: list[dict[str, Any]]) -> list[str]:
    return "".join(output.get("text", "") for output in outputs).splitlines()


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name, value in SMALL.items():
        text = re.sub(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
    outputs = [output for cell in _executed(text, tmp_path) for output in cell]
    assert any("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_progress_is_one_display_that_moves_and_a_few_lines(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            plain_text(number, 2000), encoding="utf-8"
        )
    _, prepared, trained, result, _ = _executed(OF_ONES_OWN, tmp_path)
    bars, manifest = prepared
    assert "tokenize" in bars["data"]["text/html"]
    assert len(manifest["data"]["text/plain"]) < 300
    (moved,) = filter(_is_live, trained)
    for words in ("step 40/40", "tokens/s", "1 worker", "checkpoint 40"):
        assert words in moved["data"]["text/html"]
        assert words in moved["data"]["text/plain"]
    lines = _lines(trained)
    assert lines[0] == "training on 1 worker (attempt 1)"
    assert any(line.startswith("checkpoint of step 40") for line in lines)
    assert "<td>final_loss</td>" in result[0]["data"]["text/html"]
