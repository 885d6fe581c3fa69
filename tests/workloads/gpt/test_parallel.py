"""The model under checkpointing, compilation and FSDP2."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from elastrata_workloads.unpadded.block import Block
from support.ranks import run_ranks

torchs_own_warnings = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:`torch.jit:DeprecationWarning"
)
LENGTHS = (30, 30, 21, 9, 9, 4)


def gradients(gpt, model, *batches) -> dict[str, torch.Tensor]:
    """Gradients of the summed losses over all batches."""
    for batch in batches:
        sum(gpt.loss(model, batch).terms.values()).backward()
    return {
        name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): p.grad
        for name, p in model.named_parameters()
    }


@pytest.fixture(params=["gpt2", "llama", "stable"])
def case(request, make_gpt, make_rows, vocabulary):
    gpt = make_gpt(request.param, dropout=0.1)
    return (
        gpt,
        gpt.build_model(vocabulary, 64),
        gpt.collate(make_rows(LENGTHS), vocabulary, seed=0),
    )


def test_blocks_are_the_blocks_in_order(case) -> None:
    gpt, model, _ = case
    assert gpt.blocks(model) == list(model.blocks)
    with pytest.raises(TypeError, match="expected a Stack, got Linear"):
        gpt.blocks(torch.nn.Linear(1, 1))


def test_recomputed_activations_give_equal_gradients(case) -> None:
    gpt, model, batch = case
    recomputing = copy.deepcopy(model)
    apply_activation_checkpointing(recomputing, check_fn=lambda module: isinstance(module, Block))
    torch.testing.assert_close(
        gradients(gpt, recomputing, batch), gradients(gpt, model, batch), rtol=0, atol=0
    )


def test_tokens_that_fill_a_batch_up_change_no_gradient(case) -> None:
    gpt, model, batch = case
    filled = batch.filled(7)
    assert len(batch.input_ids) % 7
    assert len(filled.input_ids) % 7 == 0
    assert filled.offsets[-1] == len(filled.input_ids) == sum(filled.segment_lengths)
    torch.testing.assert_close(
        gradients(gpt, copy.deepcopy(model), filled), gradients(gpt, model, batch)
    )
    assert filled.filled(7) is filled


@torchs_own_warnings
def test_blocks_compile_once_whatever_the_lengths(case, make_rows, vocabulary) -> None:
    gpt, model, batch = case
    counter = CompileCounter()
    for block in gpt.blocks(model):
        block.compile(backend=counter, dynamic=True)
    gradients(gpt, model, batch)
    compiled = counter.frame_count
    for lengths in ([31, 8], [17] * 5, list(range(40, 20, -1)), []):
        gradients(gpt, model, gpt.collate(make_rows(lengths), vocabulary, seed=0))
    assert counter.frame_count == compiled


@pytest.mark.matrix  # half a minute of compiling; BERT's is quick
@torchs_own_warnings
def test_compiled_blocks_give_equal_gradients(case) -> None:
    gpt, model, batch = case
    compiled = copy.deepcopy(model)
    for block in gpt.blocks(compiled):
        block.compile(dynamic=True)
    torch.testing.assert_close(gradients(gpt, compiled, batch), gradients(gpt, model, batch))


def _sharded_gradients(rank: int, world_size: int, gpt, vocabulary, parts) -> dict:
    """Of every parameter, whole; the same on every rank."""
    torch.manual_seed(0)
    model = gpt.build_model(vocabulary, 64)
    for module in (*gpt.blocks(model), model):
        fully_shard(module)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    found = gradients(gpt, model, *(gpt.collate(p, vocabulary, 0) for p in parts[rank]))
    return {name: g.full_tensor() for name, g in found.items() if isinstance(g, DTensor)}


@pytest.mark.parametrize("style", ["gpt2", "stable"])
def test_sharded_gradients_equal_those_of_one_process(
    style: str, make_gpt, make_rows, vocabulary
) -> None:
    """Rank 1 has an empty micro-batch second, and still takes part in every collective."""
    gpt, rows = make_gpt(style), make_rows(LENGTHS)
    parts = [[rows[:1], rows[1:3]], [rows[3:], rows[:0]]]
    sharded, _ = run_ranks(2, _sharded_gradients, gpt, vocabulary, parts)
    torch.manual_seed(0)
    model = gpt.build_model(vocabulary, 64)
    torch.testing.assert_close(
        sharded,
        gradients(gpt, model, gpt.collate(rows, vocabulary, 0)),
        rtol=1e-4,
        atol=1e-5,
    )


@pytest.fixture
def one_rank(tmp_path: Path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_bf16_sharding_trains_close_to_fp32(case) -> None:
    gpt, model, batch = case
    exact = gpt.loss(model, batch).terms["lm"]
    sharded = copy.deepcopy(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*gpt.blocks(sharded), sharded):
        fully_shard(module, mp_policy=policy)
    low = gpt.loss(sharded, batch).terms["lm"]
    low.backward()
    # bfloat16 has 8 bits: half a percent per operation, averaged over the predictions.
    torch.testing.assert_close(low, exact, rtol=0.01, atol=0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in sharded.parameters())
