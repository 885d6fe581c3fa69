"""The pictures: they are drawn from any run, however short, without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from elastrata.tracking.plots import loss_curve


@pytest.mark.parametrize("steps", [1, 5, 500])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_loss_curve(tmp_path: Path, steps: int, held_out: bool) -> None:
    records = [{"step": step, "loss": 9 / step} for step in range(1, steps + 1)]
    evaluations = [{"step": steps, "eval_loss": 1.0}] if held_out else []
    loss_curve(records + evaluations, tmp_path / "plots" / "curve.png")
    pixels = imread(tmp_path / "plots" / "curve.png")
    assert pixels.shape[:2] == (720, 1280)
    assert pixels[..., :3].min() < 0.5
