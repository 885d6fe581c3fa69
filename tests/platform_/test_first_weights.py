"""First weights are those of the whole model, to the bit, however it is divided; and there is never
more in memory than the shards and one parameter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from elastrata.parallel.init_weights import DeferredModel, allocate
from elastrata.parallel.mesh import lone_group, rank_mesh
from elastrata.parallel.sharding import local, local_part
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.build_model import DividedModel, build_divided_model
from elastrata_pipelines.format import Vocabulary
from support.live_bytes import LiveBytes
from support.ranks import run_fresh_ranks
from support.synthetic import tiny_recipe

VOCABULARY = Vocabulary(size=97, pad_id=3, mask_id=4, special_ids=(3, 4), continuation_ids=())
SIZES = {"hidden_size": 24, "num_layers": 4, "num_heads": 2, "embedding_multiple": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"name": "gpt", **SIZES},
    "llama": {"name": "gpt", **SIZES, "positions": "rotary", "activation": "swiglu", "norm": "rms",
              "bias": False, "tied_embeddings": False},
    "bert": {"name": "bert", **SIZES, "next_sentence": True},
    "modernbert": {"name": "modernbert", **SIZES, "window": 8},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "hsdp": {"replicate": 2},
    "copies": {"replicate": "all"},
    "tensor": {"tensor": 2, "sequence": True},
    "stages": {"pipeline": 2},
    "all": {"pipeline": 2, "tensor": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"},
}
CPU, WORLD = torch.device("cpu"), 8


def _recipe(name: str, parallel: dict[str, Any]) -> Recipe:
    workers = {"min": WORLD, "max": WORLD, "cpus": 1}
    values = tiny_recipe("data", "runs", workload=MODELS[name], parallel=parallel, workers=workers)
    return Recipe.model_validate(values)


def _whole(recipe: Recipe) -> nn.Module:
    torch.manual_seed(recipe.seed)
    return recipe.workload.build_model(VOCABULARY, 16)


def _divided(recipe: Recipe, world_size: int, *, draws: bool = True) -> DividedModel:
    return build_divided_model(recipe, VOCABULARY, 16, CPU, world_size, draws=draws)


@pytest.mark.parametrize("rank", [6, pytest.param(0, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("name", MODELS)
def test_every_rank_has_its_shards(name: str, rank: int) -> None:
    assert run_fresh_ranks(1, _as_one_of_many, rank, _wrong_shards, name) == [[]]


def _as_one_of_many(_: int, __: int, rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on that rank of `WORLD`, the others of which say nothing."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    return function(*args)


def _wrong_shards(name: str) -> list[str]:
    found = []
    for layout, parallel in LAYOUTS.items():
        recipe = _recipe(name, parallel)
        whole, after = dict(_whole(recipe).named_parameters()), torch.rand(3)
        shards = dict(_divided(recipe, WORLD).model.named_parameters())
        found += [] if torch.equal(torch.rand(3), after) else [f"{layout}: generator"]
        is_cut = parallel.get("pipeline", 1) > 1
        found += [] if (shards.keys() < whole.keys()) == is_cut else [f"{layout}: names"]
        for parameter, value in shards.items():
            assert isinstance(value, DTensor)
            if not torch.equal(value.to_local(), local_part(whole[parameter], value)):
                found.append(f"{layout}: {parameter}")
    return found


def test_no_more_is_in_memory_than_the_shards_and_one_parameter() -> None:
    (found,) = run_fresh_ranks(1, _as_one_of_many, 6, _bytes)
    largest = max(parameter.nbytes for parameter in _whole(_recipe("llama", {})).parameters())
    assert found.keys() == {(layout, draws) for layout in _DIVIDED for draws in (True, False)}
    for (layout, draws), (peak, own) in found.items():
        assert own <= peak <= own + draws * largest + 64, layout


_DIVIDED = ("fsdp", "all")


def _bytes() -> dict[tuple[str, bool], tuple[int, int]]:
    """By layout, and whether weights are drawn: the most bytes at a time while a model is made, and
    those of its shards."""
    found = {}
    for layout, draws in product(_DIVIDED, (True, False)):
        recipe = _recipe("llama", LAYOUTS[layout])
        with LiveBytes() as live:
            divided = _divided(recipe, WORLD, draws=draws)
        shards = {local(p).untyped_storage()._cdata: p for p in divided.model.parameters()}
        own = sum(local(shard).untyped_storage().nbytes() for shard in shards.values())
        found[layout, draws] = live.peak, own
    return found


class _Odd(nn.Module):
    """Two names for a parameter, one that is frozen, values that are there before a module has
    them, some that are changed after others were drawn, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("places", torch.arange(6))
        self.last = nn.Linear(40, 50)
        nn.init.trunc_normal_(self.first.bias)
        with torch.no_grad():
            self.scale.mul_(torch.rand(2))
            self.last.weight[7].zero_()
            self.first.weight.add_(self.last.weight[:4, :3])
            self.last.weight.mul_(2.0)


def test_ties_frozen_parameters_later_changes_and_buffers_stay() -> None:
    torch.manual_seed(1)
    whole, after = _Odd(), torch.rand(3)
    torch.manual_seed(1)
    outline = DeferredModel(_Odd)
    with lone_group(CPU):
        model = fully_shard(outline.model, mesh=rank_mesh("cpu", 1, 1))
    allocate(model, CPU)
    outline.fill_buffers(model)
    assert torch.equal(model.get_buffer("places"), whole.get_buffer("places"))
    torch.manual_seed(1)
    outline.draw(model)
    assert torch.equal(torch.rand(3), after)
    assert not model.get_parameter("frozen").requires_grad
    ours = {name: local(value) for name, value in model.named_parameters()}
    assert ours.keys() == dict(whole.named_parameters()).keys()
    for name, value in whole.named_parameters():
        assert torch.equal(ours[name], value), name
