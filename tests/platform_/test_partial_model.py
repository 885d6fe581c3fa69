"""A model of which a process has a part, with the numbers of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from elastrata.core.partial_model import partial_model
from elastrata.core.workload import workload_class
from elastrata_pipelines.format import Vocabulary

VOCABULARY = Vocabulary(size=97, pad_id=3, mask_id=4, special_ids=(3, 4), continuation_ids=())
SIZES = {"hidden_size": 24, "num_layers": 4, "num_heads": 2, "embedding_multiple": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"name": "gpt", **SIZES},
    "llama": {"name": "gpt", **SIZES, "positions": "rotary", "activation": "swiglu", "norm": "rms",
              "bias": False, "tied_embeddings": False},
    "bert": {"name": "bert", **SIZES, "next_sentence": True},
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("blocks", [[0, 1], [0, 2], [1], [1, 3], [3], range(4)])
def test_stages_begin_with_the_numbers_of_the_whole_model(name: str, blocks: list[int]) -> None:
    workload = workload_class(MODELS[name]["name"]).model_validate(MODELS[name])

    def build() -> nn.Module:
        torch.manual_seed(7)
        return workload.build_model(VOCABULARY, 16)

    whole = dict(build().named_parameters())
    after = torch.rand(3)
    model = partial_model(build, lambda outline: workload.stage(outline, blocks).parameters(), CPU)
    assert torch.equal(torch.rand(3), after)
    stage = dict(workload.stage(model, blocks).named_parameters())
    assert stage.keys() < whole.keys() or len(blocks) == 4
    assert all(torch.equal(value, whole[name]) for name, value in stage.items())
    for name, value in model.named_parameters():
        assert value.is_meta == (name not in stage), name
        assert value.shape == whole[name].shape


class _Odd(nn.Module):
    """Two names for a parameter, one that is frozen, values that are there before a module has
    them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Parameter(torch.rand(5), requires_grad=False)
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("places", torch.arange(6))
        self.last = nn.Linear(40, 50)


def _build() -> _Odd:
    torch.manual_seed(1)
    return _Odd()


@pytest.mark.parametrize("wanted", [("last",), ("first",), ("scale", "frozen"), ()])
def test_ties_frozen_parameters_and_buffers_stay(wanted: tuple[str, ...]) -> None:
    whole = _build()
    names = [name for name, _ in whole.named_parameters() if name.startswith(wanted)]
    names = names if wanted else []
    model = partial_model(_build, lambda outline: map(outline.get_parameter, names), CPU)
    assert model.tied.weight is model.first.weight
    assert not model.frozen.requires_grad
    assert torch.equal(model.places, whole.places)
    there = [name for name, value in model.named_parameters() if not value.is_meta]
    assert there == names
    for name in there:
        assert torch.equal(model.get_parameter(name), whole.get_parameter(name))


def test_modules_are_as_ever_afterwards() -> None:
    with pytest.raises(RuntimeError, match="in the middle"):
        partial_model(_fails, lambda _: [], CPU)
    assert not nn.Linear(2, 2).weight.is_meta
    with torch.device("meta"):
        drawn = nn.Linear(2, 2)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    drawn.weight.data.normal_()
    assert torch.equal(torch.rand(2), expected)


def _fails() -> nn.Module:
    if not torch.empty(0).is_meta:
        raise RuntimeError("in the middle")
    return nn.Linear(2, 2)
