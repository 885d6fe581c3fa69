"""The pictures: they are drawn from any run, however short, without a warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from elastrata.tracking import plots
from elastrata.tracking.plots import layout_cloud, loss_curve


@pytest.mark.parametrize("steps", [1, 5, 500])
@pytest.mark.parametrize("held_out", [False, True])
def test_a_loss_curve(tmp_path: Path, steps: int, held_out: bool) -> None:
    records = [{"step": step, "loss": 9 / step} for step in range(1, steps + 1)]
    evaluations = [{"step": steps, "eval_loss": 1.0}] if held_out else []
    loss_curve(records + evaluations, tmp_path / "plots" / "curve.png")
    pixels = imread(tmp_path / "plots" / "curve.png")
    assert pixels.shape[:2] == (720, 1280)
    assert pixels[..., :3].min() < 0.5


def test_names_of_layouts_do_not_lie_over_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    save = plots.save
    monkeypatch.setattr(plots, "save", lambda *a: (figures.append(a[0]), save(*a)))
    names = [f"tp1 pp{number} zero_bubble 1x4 mb1 keep" for number in range(3)]
    close = [(76.0 + number / 9, 20_000.0, name) for number, name in enumerate(names)]
    clouds = [(float(gib), 9e3 + gib, 1) for gib in range(30, 78)]
    layout_cloud(clouds, close, 79.2, tmp_path / "layouts.png")
    (figure,) = figures
    texts = [*figure.legends[0].get_texts(), *figure.axes[0].get_legend().get_texts()]
    shown = [text.get_text() for text in texts]
    assert shown == [*(f"{n}. {name}" for n, name in enumerate(names, 1)), "1 stage",
                     "a device's memory"]  # fmt: skip
    boxes = [text.get_window_extent() for text in texts]
    axes = figure.axes[0].get_window_extent()
    assert not any(box.overlaps(axes) for box in boxes)
    assert not any(a.overlaps(b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert all(figure.bbox.containsx(box.x1) for box in boxes)
