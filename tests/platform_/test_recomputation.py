"""What a block computes again in its backward pass changes no bit of what it computes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from elastrata.bench.samples import Samples, bench_samples
from elastrata.core.recomputation import Recomputation, recompute
from elastrata.core.workload import Workload
from elastrata.recipe.recipe import Recipe
from support.ranks import run_ranks
from support.reduction_ranks import train_each_way
from support.synthetic import SEQ_LEN, tiny_recipe, write_data_set

LAYERS = 2
LLAMA = {
    "name": "gpt",
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rms",
    "hidden_size": 32,
    "num_layers": LAYERS,
    "num_heads": 2,
    "max_positions": SEQ_LEN,
}
GPT2 = {**LLAMA, "positions": "learned", "activation": "gelu", "norm": "layer"}
BERT = {"name": "bert", "hidden_size": 32, "num_layers": LAYERS, "num_heads": 2}
# Of query, key, value, output, and the feed-forward's two or three. The last is done again where
# dropout and a norm follow it, as in BERT; else its result is not needed.
AGAIN = {"bert": (0, 3, 6), "gpt2": (0, 2, 5), "llama": (0, 3, 6)}
"""Matrix products of a block that are computed again: none, selective, full."""


class _Counted(TorchDispatchMode):
    """How often which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = "matmul" if func.name() in ("aten::mm", "aten::addmm") else func.name()
        self.seen[kind] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=100)
    return folder


def _trained(
    way: Recomputation, workload: Workload, samples: Samples
) -> tuple[dict[str, Tensor | None], Counter[str]]:
    """The gradients, and what ran in the backward pass."""
    torch.manual_seed(0)
    model = workload.build_model(samples.vocabulary, SEQ_LEN)
    for block in workload.blocks(model):
        recompute(block, way)
    batch = workload.collate(samples.steps[0].rows, samples.vocabulary, seed=0)
    loss = workload.loss(model, batch)
    with _Counted() as counted:
        torch.stack(list(loss.terms.values())).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}, counted.seen


@pytest.mark.parametrize(
    ("name", "workload"), [("bert", BERT), ("gpt2", GPT2), ("llama", LLAMA)], ids=list(AGAIN)
)
def test_gradients_are_equal_and_so_much_is_computed_again(
    name: str, workload: dict[str, Any], folder: Path
) -> None:
    values = tiny_recipe(folder, folder / "runs", workload=workload)
    recipe = Recipe.model_validate(values)
    samples = bench_samples(recipe, None, steps=1)
    runs = [_trained(way, recipe.workload, samples) for way in ("none", "selective", "full")]
    plain, ran = runs[0]
    attention = next(name for name in ran if "scaled_dot_product" in name)
    forward = attention.replace("_backward", "")
    for (gradients, seen), again in zip(runs, AGAIN[name], strict=True):
        assert all(torch.equal(gradients[key], plain[key]) for key in plain)
        assert seen["matmul"] - ran["matmul"] == again * LAYERS
    assert [seen[forward] > 0 for _, seen in runs] == [False, False, True]


def test_losses_are_equal_to_the_bit_on_ranks(folder: Path) -> None:
    recipe = tiny_recipe(folder, folder / "runs", steps=4, micro_batch_tokens=96)
    ranks = [
        run_ranks(2, train_each_way, {**recipe, "activation_checkpointing": way}, [{}])[0][0]
        for way in ("none", "selective", "full")
    ]
    plain, *others = [[(r.loss, r.gradient_norm) for r in records] for records in ranks]
    assert all(found == plain for found in others)
