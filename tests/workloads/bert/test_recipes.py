"""The recipes that come with BERT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastrata_workloads.bert
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.format import Vocabulary

RECIPES = sorted((Path(elastrata_workloads.bert.__file__).parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_complete(path: Path) -> None:
    recipe = load_recipe(f"bert/{path.stem}")
    assert recipe.name == f"bert-{path.stem}"
    prepare = recipe.data.prepare
    assert prepare is not None
    assert prepare.held_out
    assert prepare.seq_len <= recipe.workload.max_positions


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
