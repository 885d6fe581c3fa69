"""The recipes that come with ModernBERT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import elastrata_workloads.modernbert
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.groups import count_samples

RECIPES = sorted((Path(elastrata_workloads.modernbert.__file__).parent / "recipes").glob("*.yaml"))
BILLION = 10**9


def test_every_recipe_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "recipes.md").read_text(
        encoding="utf-8"
    )
    section = guide.split("## Recipes that ship\n")[1].split("\n#")[0]
    listed = re.findall(r"`modernbert/([\w-]+)`", section)
    assert sorted(listed) == sorted(path.stem for path in RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_complete(path: Path) -> None:
    recipe = load_recipe(f"modernbert/{path.stem}")
    for part in recipe.parts:
        prepare = part.data.prepare
        assert prepare is not None
        assert prepare.held_out
        assert prepare.seq_len <= recipe.workload.max_positions


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("base", [1719]),
        ("base-8192", [250, 50]),
        ("large", [900, 800]),
        ("large-8192", [250, 50]),
    ],
)
def test_stages_have_the_published_tokens(name: str, billions: list[int]) -> None:
    parts = load_recipe(f"modernbert/{name}").parts
    tokens = [
        part.data.prepare.seq_len
        * count_samples(part.steps, full=part.batch_size, warmup=part.batch_size_warmup)
        for part in parts
    ]
    assert tokens == pytest.approx([count * BILLION for count in billions], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rate", "taken"),
    [("base", 8e-4, 1e-5), ("base-8192", 3e-4, 1e-5), ("large", 5e-4, 1e-5)],
)
def test_the_published_rates(name: str, rate: float, taken: float) -> None:
    optimizer = load_recipe(f"modernbert/{name}").parts[0].optimizer
    assert optimizer.lr == rate
    assert optimizer.lr * optimizer.weight_decay == pytest.approx(taken, rel=2e-3)


@pytest.mark.parametrize(("name", "millions"), [("base", 149), ("large", 395)])
def test_sizes_are_the_published_ones(name: str, millions: int) -> None:
    workload = load_recipe(f"modernbert/{name}").workload
    ids = Vocabulary(size=50368, pad_id=0, mask_id=1, special_ids=(0, 1), continuation_ids=())
    with torch.device("meta"):
        model = workload.build_model(ids, 1024)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / 1e6 - millions) < 1.5
