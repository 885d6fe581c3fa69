"""The recipes that come with BERT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import elastrata_workloads.bert
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.step.schedule import learning_rate
from elastrata_pipelines.format import Vocabulary

RECIPES = sorted((Path(elastrata_workloads.bert.__file__).parent / "recipes").glob("*.yaml"))


def test_every_recipe_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "recipes.md").read_text(
        encoding="utf-8"
    )
    section = guide.split("## Recipes that ship\n")[1].split("\n#")[0]
    listed = re.findall(r"`bert/([\w-]+)`", section)
    assert sorted(listed) == sorted(path.stem for path in RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_complete(path: Path) -> None:
    recipe = load_recipe(f"bert/{path.stem}")
    assert recipe.name == f"bert-{path.stem}"
    for part in recipe.parts:
        prepare = part.data.prepare
        assert prepare is not None
        assert prepare.held_out
        assert prepare.seq_len <= recipe.workload.max_positions


def test_mlperfs_evaluation_is_that_of_its_rules() -> None:
    for name in ("mlperf", "mlperf-adam"):
        recipe = load_recipe(f"bert/{name}")
        samples = 0.05 * (230.23 * recipe.batch_size + 3_000_000)
        assert recipe.evaluation.every_samples == samples // 25_000 * 25_000


def test_the_published_rates() -> None:
    lamb, adam = load_recipe("bert/mlperf"), load_recipe("bert/mlperf-adam")
    phase, both = load_recipe("bert/lamb-128"), load_recipe("bert/lamb")
    assert _rate(lamb, 99) == pytest.approx(2e-3 * 100 / 101)
    assert _rate(lamb, 570) == pytest.approx(2e-3 * (1 - 570 / 1141))
    assert _rate(adam, 82) == 3.93e-4
    assert _rate(adam, adam.steps) == pytest.approx(4.95e-5, rel=1e-3)
    assert _rate(phase, 2001) == pytest.approx(6e-3 * (1 - 0.2843) ** 0.5, rel=1e-4)
    assert both.learning_rate(2001) == phase.learning_rate(2001)
    assert both.learning_rate(7038 + 200) == pytest.approx(4e-3 * (1 - 200 / 1563) ** 0.5)


def _rate(recipe: Recipe, step: int) -> float:
    peak = recipe.optimizer.lr
    return learning_rate(recipe.schedule, peak=peak, step=step, steps=recipe.steps)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("tiny", 4.4), ("mini", 11.2), ("small", 28.8), ("base", 109.5), ("large", 335.1)],
)
def test_sizes_are_the_published_ones(name: str, millions: float) -> None:
    """Parameters without the masked-LM head, as Turc et al. 2019 and transformers count them."""
    workload = load_recipe(f"bert/{name}", ["workload.next_sentence=true"]).workload
    vocabulary = Vocabulary(
        size=30522, pad_id=0, mask_id=103, special_ids=(0, 103), continuation_ids=()
    )
    with torch.device("meta"):
        model = workload.build_model(vocabulary, 512)
    count = sum(parameter[:30522].numel() for parameter in model.bert.parameters())
    assert round(count / 1e6, 1) == millions
