"""The recipes that come with GPT."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import elastrata_workloads.gpt
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.format import Vocabulary

RECIPES = sorted((Path(elastrata_workloads.gpt.__file__).parent / "recipes").glob("*.yaml"))
MEGATRON = [path.stem for path in RECIPES if path.stem.startswith("megatron-")]
GPT3 = ["125m", "350m", "760m", "1.3b", "7b", "13b"]


def test_every_recipe_is_documented() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "recipes.md").read_text(
        encoding="utf-8"
    )
    section = guide.split("## Recipes that ship\n")[1].split("\n#")[0]
    listed = re.findall(r"`gpt/([\w.-]+)`", section)
    assert sorted(listed) == sorted(path.stem for path in RECIPES)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_complete(path: Path) -> None:
    recipe = load_recipe(f"gpt/{path.stem}")
    assert recipe.name == f"gpt-{path.stem}"
    prepare = recipe.data.prepare
    assert prepare is not None
    assert prepare.held_out
    assert prepare.seq_len <= recipe.workload.max_positions


def _parameters(recipe: Recipe, num_ids: int) -> int:
    """Parameters of the model with so many ids; it is built without its numbers."""
    vocabulary = Vocabulary(
        size=num_ids, pad_id=0, mask_id=None, special_ids=(), continuation_ids=()
    )
    with torch.device("meta"):
        model = recipe.workload.build_model(vocabulary, 2048)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("125m", 125), ("350m", 356), ("760m", 760), ("1.3b", 1320), ("7b", 6660), ("13b", 12850)],
)
def test_sizes_are_those_of_gpt3(name: str, millions: int) -> None:
    """Brown et al. 2020, table D.1."""
    found = _parameters(load_recipe(f"gpt/{name}"), 50257)
    assert found / 1e6 == pytest.approx(millions, rel=0.005)


def test_llama_has_as_many_parameters_as_the_published_one() -> None:
    assert _parameters(load_recipe("gpt/llama-7b"), 32000) == 6_738_415_616


def test_the_defaults_have_as_many_parameters_as_gpt2() -> None:
    recipe = load_recipe("gpt/125m", ["workload.max_positions=1024", "data.prepare.seq_len=1024"])
    plain = recipe.workload.model_copy(update={"embedding_multiple": 1})
    smaller = recipe.model_copy(update={"workload": plain})
    assert _parameters(smaller, 50257) == 124_439_808


@pytest.mark.parametrize(
    ("name", "billions", "gpus", "batch_size", "micro_batch", "layout"),
    [
        ("1.7b", 1.7, 32, 512, 16, (1, 1, 1)),
        ("3.6b", 3.6, 64, 512, 16, (2, 1, 1)),
        ("7.5b", 7.5, 128, 512, 16, (4, 1, 1)),
        ("18.4b", 18.4, 256, 1024, 8, (8, 1, 1)),
        ("39.1b", 39.1, 512, 1536, 4, (8, 2, 1)),
        ("76.1b", 76.1, 1024, 1792, 2, (8, 4, 3)),
        ("145.6b", 145.6, 1536, 2304, 2, (8, 8, 2)),
        ("310.1b", 310.1, 1920, 2160, 1, (8, 16, 2)),
        ("529.6b", 529.6, 2520, 2520, 1, (8, 35, 3)),
        ("1t", 1008.0, 3072, 3072, 1, (8, 64, 1)),
    ],
)
def test_megatrons_models_are_those_of_its_table(
    name: str,
    billions: float,
    gpus: int,
    batch_size: int,
    micro_batch: int,
    layout: tuple[int, ...],
) -> None:
    """Narayanan et al. 2021, table 1. Its count is by equation 2, which the model's is held to."""
    recipe = load_recipe(f"gpt/megatron-{name}")
    sizes = (recipe.workers.max, recipe.batch_size, recipe.micro_batch_tokens)
    assert sizes == (gpus, batch_size, micro_batch * 2048)
    parallel = recipe.parallel
    assert (parallel.tensor, parallel.pipeline, parallel.virtual_stages) == layout
    assert recipe.workers.min == parallel.group_size
    count = _parameters(recipe, 50257)
    assert round(count / 1e9, 1) == billions
    workload = recipe.workload
    h, layers, rows = workload.hidden_size, workload.num_layers, 51200
    final_norm = 2 * h
    assert count == 12 * layers * h**2 + 13 * layers * h + (rows + 2048) * h + final_norm
    assert workload.shape(50257).num_embeddings == rows


@pytest.mark.parametrize("name", [*GPT3, "llama-7b", *MEGATRON])
def test_steps_and_warm_up_are_so_many_tokens(name: str) -> None:
    recipe = load_recipe(f"gpt/{name}")
    tokens = {"llama-7b": 1e12, "megatron-1t": 450e9}.get(name, 300e9)
    warm_up = 2000 * 2048 * 2048 if name == "llama-7b" else 375e6
    per_step = recipe.batch_size * 2048
    assert recipe.steps == pytest.approx(tokens / per_step, abs=1)
    assert recipe.schedule.warmup_steps == pytest.approx(warm_up / per_step, abs=1)
    assert recipe.learning_rate(recipe.steps - 1) == pytest.approx(
        recipe.optimizer.lr / 10, rel=1e-3
    )
