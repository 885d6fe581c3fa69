"""What a block computes again in its backward pass changes no bit of what it computes; compiled, it
is one graph whatever it computes again, for all blocks of a kind and all lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from elastrata.bench.samples import Samples, bench_samples
from elastrata.optim.optimizer import build_optimizer
from elastrata.parallel.activation_checkpointing import Recomputation, recompute
from elastrata.parallel.mesh import lone_group
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.build_model import build_divided_model
from elastrata.trainer.trainer import build_loop
from elastrata.workload.workload import Workload
from elastrata_pipelines.batches import Start
from support.fake_cuda import NEEDS_COMPILER
from support.synthetic import MODERNBERT, SEQ_LEN, tiny_recipe, write_data_set

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
AGAIN = {"bert": (0, 3, 6), "gpt2": (0, 2, 5), "llama": (0, 3, 6), "modernbert": (0, 3, 6)}
"""Matrix products of a block that are computed again: none, selective, full."""
COMPILED_AGAIN = {
    "bert": (0, 3, 6),
    "gpt2": (0, 2, 6),
    "llama": (0, 3, 7),
    "modernbert": (0, 3, 7),
}
"""Likewise, compiled: with full a graph is computed whole."""
MODERN = {**MODERNBERT, "num_layers": LAYERS}
WORKLOADS = {"bert": BERT, "gpt2": GPT2, "llama": LLAMA, "modernbert": MODERN}
KINDS = {"modernbert": 2}
"""Kinds of blocks, where there are several: here the first, global and without a norm of its input,
and a local one."""
WAYS: tuple[Recomputation, ...] = ("none", "selective", "full")
DYNAMO_LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""It hides that warning, and it is an error here before it can."""
COMPILED = ("llama", "selective")
"""What is compiled by default; all of it is slow."""
CPU, STEPS = torch.device("cpu"), 4


class _Counted(TorchDispatchMode):
    """How often which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[_kind(func.name())] += 1
        return func(*args, **(kwargs or {}))


def _kind(operator: str) -> str:
    return "matmul" if operator in ("aten::mm", "aten::addmm") else operator


def _ran(backward: Callable[[], None], *, compile: bool) -> Counter[str]:
    """How often which operators run. What is compiled would not be under a mode, and a profiler
    sees operators under modes several times."""
    if not compile:
        with _Counted() as counted:
            backward()
        return counted.seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        backward()
    return Counter(_kind(event.name) for event in profile.events())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_data_set(folder, samples=100)
    return folder


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch traces, differentiates and partitions what it compiles, and generates no code."""
    compile, backend = torch.compile, "aot_eager_decomp_partition"
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile(f, backend=backend, **how))
    torch._dynamo.reset()
    counters.clear()


def _trained(
    way: Recomputation, workload: Workload, samples: Samples, *, compile: bool = False
) -> tuple[dict[str, Tensor | None], Counter[str]]:
    """The gradients, and what ran in the backward pass."""
    torch.manual_seed(0)
    model = workload.build_model(samples.vocabulary, SEQ_LEN)
    for block in workload.blocks(model):
        recompute(block, way, compile=compile)
    batch = workload.collate(samples.steps[0].rows, samples.vocabulary, seed=0)
    loss = workload.loss(model, batch)
    seen = _ran(torch.stack(list(loss.terms.values())).sum().backward, compile=compile)
    return {name: p.grad for name, p in model.named_parameters()}, seen


def _case(name: str, folder: Path) -> tuple[Workload, Samples]:
    values = tiny_recipe(folder, folder / "runs", workload=WORKLOADS[name])
    recipe = Recipe.model_validate(values)
    return recipe.workload, bench_samples(recipe, None, steps=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_are_equal_and_so_much_is_computed_again(name: str, folder: Path) -> None:
    runs = [_trained(way, *_case(name, folder)) for way in WAYS]
    plain, ran = runs[0]
    forward = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert ran[f"{forward}_backward"] > 0
    for (gradients, seen), again in zip(runs, AGAIN[name], strict=True):
        assert all(torch.equal(gradients[key], plain[key]) for key in plain)
        assert seen["matmul"] - ran["matmul"] == again * LAYERS
    assert [seen[forward] > 0 for _, seen in runs] == [False, False, True]


@DYNAMO_LOOKS
@pytest.mark.matrix  # the one below compiles, too
@pytest.mark.parametrize("name", WORKLOADS)
def test_compiled_gradients_are_equal_and_so_much_is_computed_again(
    name: str, folder: Path, traced: None
) -> None:
    plain, ran = _trained("none", *_case(name, folder))
    for way, again in zip(WAYS, COMPILED_AGAIN[name], strict=True):
        gradients, seen = _trained(way, *_case(name, folder), compile=True)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, plain[key])
        assert seen["matmul"] - ran["matmul"] == again * LAYERS
        attention = "elastrata::attention_by_runs"
        assert (seen[attention] > 0, seen[f"{attention}_backward"]) == (way == "full", LAYERS)


@NEEDS_COMPILER
@DYNAMO_LOOKS
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if (name, way) == COMPILED else pytest.mark.matrix)
        for name, way in product(WORKLOADS, WAYS)
    ],
)
def test_one_graph_serves_all_blocks_of_a_kind_and_all_lengths(
    name: str, way: Recomputation, folder: Path, traced: None
) -> None:
    plain = _plain(name, folder)
    assert not counters["stats"]
    compiled, graphs = _losses(WORKLOADS[name], folder, compile=True, activation_checkpointing=way)
    assert compiled == [pytest.approx(one, rel=1e-5) for one in plain]
    assert graphs == [KINDS.get(name, 1)] * STEPS
    assert not counters["graph_break"]
    assert not counters["recompiles"]


@pytest.mark.matrix
@DYNAMO_LOOKS
def test_compiled_blocks_may_change_what_they_compute_again(folder: Path, traced: None) -> None:
    plain = _plain("llama", folder)
    ways: list[Recomputation] = ["selective", "none", "selective"]
    compiled, graphs = _losses(
        WORKLOADS["llama"], folder, ways, compile=True, activation_checkpointing="full"
    )
    assert compiled == [pytest.approx(one, rel=1e-5) for one in plain]
    assert graphs == sorted(graphs)
    assert graphs[-1] <= len(WAYS)
    assert not counters["graph_break"]


@cache
def _plain(name: str, folder: Path) -> list[tuple[float, float]]:
    return _losses(WORKLOADS[name], folder)[0]


def _losses(
    workload: dict[str, Any], folder: Path, ways: Iterable[Recomputation] = (), **keys: Any
) -> tuple[list[tuple[float, float]], list[int]]:
    """Loss and gradient norm of every step of a lone rank with FSDP2, and how many graphs there are
    after it. Each of `ways` takes turns, after a step."""
    sizes = {"steps": STEPS, "micro_batch_tokens": 96}
    recipe = Recipe.model_validate(tiny_recipe(folder, folder, workload=workload, **sizes, **keys))
    samples = bench_samples(recipe, None, steps=STEPS)
    lengths = {len(rows.tokens) for step in samples.steps for rows in step.micro_batches}
    assert len(lengths) > STEPS
    losses, graphs, next_way = [], [], iter(ways)
    with lone_group(CPU):
        divided = build_divided_model(recipe, samples.vocabulary, samples.seq_len, CPU, 1)
        optimizer = build_optimizer(recipe.optimizer, divided.model, divided.blocks)
        loop = build_loop(recipe, divided.clip, samples.vocabulary, CPU, 1)
        for record, _ in loop.run(divided.forward_backward, optimizer, samples.steps, Start()):
            losses.append((record.loss, record.gradient_norm))
            graphs.append(counters["stats"]["unique_graphs"])
            if way := next(next_way, None):
                divided.recompute(way)
    return losses, graphs
