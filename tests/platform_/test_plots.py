"""The pictures: they are drawn from any run, however short, without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from elastrata.tracking.plots import imbalance_curves, length_strata, loss_curve


@pytest.mark.parametrize("steps", [1, 5, 500])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_loss_curve(tmp_path: Path, steps: int, held_out: bool) -> None:
    records = [{"step": step, "loss": 9 / step} for step in range(1, steps + 1)]
    evaluations = [{"step": steps, "eval_loss": 1.0}] if held_out else []
    loss_curve(records + evaluations, tmp_path / "plots" / "curve.png")
    pixels = imread(tmp_path / "plots" / "curve.png")
    assert pixels.shape[:2] == (720, 1280)
    assert pixels[..., :3].min() < 0.5


@pytest.mark.parametrize("histogram", [[0, 0, 7], [0] + [3] * 128, list(range(513)), [0, 1]])
def test_length_strata(tmp_path: Path, histogram: list[int]) -> None:
    length_strata(histogram, tmp_path / "strata.png")
    assert imread(tmp_path / "strata.png").shape[:2] == (720, 1280)


@pytest.mark.parametrize("sizes", [[1, 8, 64], [1, 8], list(range(1, 40))])
def test_imbalance_curves(tmp_path: Path, sizes: list[int]) -> None:
    curves = {
        "dealt by work": dict.fromkeys(sizes, 1.0),
        "random": {size: 1 + size / 100 for size in sizes},
    }
    imbalance_curves(curves, tmp_path / "balance.png")
    assert imread(tmp_path / "balance.png").shape[:2] == (720, 1280)
