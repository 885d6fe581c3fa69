"""The cases that look at numbers: whether what a GPU computes is right.

A case is a function, run in a process of its own, whose result is a row. Beside its own arguments
it takes what `gpu.py` tells every case (`gpu_told.py`). `is_right` in a result says whether
what was computed is what it should be.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from bert_check import check, failures, relative
from gpu_engine import engine, records, steps_after, tensors
from gpu_process import Row
from gpu_told import TINY, Told
from torch import Tensor

from elastrata.bench.samples import bench_samples
from elastrata.checkpoints.checkpoint import DurableSaver
from elastrata.checkpoints.commit import commits
from elastrata.checkpoints.training_state import restore, training_state
from elastrata.core.device import current_device
from elastrata.core.mesh import lone_group
from elastrata.recipe.file import load_recipe
from elastrata_pipelines.storage import Storage
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments

CPU = torch.device("cpu")
SMALL = ("workload.num_layers=4", "batch_size=8", "micro_batch_tokens=8192")
"""Overrides of `gpt/125m` for checks."""
EXACT = ("precision=fp32", "compile=false", "workload.attention=dense", "optimizer.fused=false")
HEADS = {"bert": (16, 16, False), "gpt": (12, 12, True), "llama": (16, 4, True)}
"""Heads of the query, of key and value, and whether attention is causal."""
LENGTHS = (512, 511, 300, 300, 128, 65, 64, 63, 7, 1)
ATTENTION_BF16, LOSS_BF16 = 1e-2, 2e-3
"""Allowed relative differences, as in `bert_check.py`."""
LOSS_FP32 = 1e-3
"""Over several steps: an optimizer that divides by a root enlarges what rounding does."""
RESTORED = 1e-5
"""Of the loss after a restart; sums on a GPU may be taken in another order each time."""


def attention_beside_dense(**told: Any) -> Row:
    """Unpadded attention in bf16 beside dense attention in fp32: results and gradients."""
    Told(**told)
    differences = {name: _attention_differs(*shape) for name, shape in HEADS.items()}
    return _checked(differences, ATTENTION_BF16)


def _attention_differs(heads: int, kv_heads: int, causal: bool) -> float:
    device = current_device()
    torch.manual_seed(0)
    tokens, size = sum(LENGTHS), 64
    shapes = [(tokens, number, size) for number in (heads, kv_heads, kv_heads, heads)]
    query, key, value, gradient = (torch.randn(shape, device=device) for shape in shapes)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).to(device, torch.int32)
    segments = Segments(ends, LENGTHS, max(LENGTHS))

    def results(dtype: torch.dtype, kernel: Any) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = attention(*leaves, segments, kernel, causal=causal)
        gradients = torch.autograd.grad(out, leaves, gradient.to(dtype))
        return [x.float() for x in (out, *gradients)]

    pairs = zip(results(torch.bfloat16, "auto"), results(torch.float32, "dense"), strict=True)
    return max(relative([ours], [exact]) for ours, exact in pairs)


def steps_beside_cpu(**told: Any) -> Row:
    """Losses and gradient norms of some steps on this device beside those on the CPU, in fp32, for
    each way of clipping."""
    Told(**told)
    differences: dict[str, float] = {}
    for model in ("gpt/125m", "bert/base"):
        for clip in ("none", "global_norm", "bucketwise"):
            tiny = TINY[model.partition("/")[0]]
            recipe = load_recipe(model, [*tiny, f"clip.method={clip}", *EXACT])
            samples = bench_samples(recipe, "full", steps=4)
            here, there = (records(recipe, samples, on) for on in (current_device(), CPU))
            for what in ("loss", "gradient_norm"):
                differences[f"{model}, {clip}, {what}"] = max(
                    abs(getattr(one, what) / getattr(other, what) - 1)
                    for one, other in zip(here, there, strict=True)
                )
    return _checked(differences, LOSS_FP32)


def ways_agree(**told: Any) -> Row:
    """The loss after some steps in bf16: compiled or not, with each way of checkpointing, beside
    that of fp32 with dense attention."""
    wanted = Told(**told)
    sizes = () if wanted.is_tiny else SMALL
    exact = wanted.recipe("gpt/125m", [*sizes, *EXACT])
    samples = bench_samples(exact, "full", steps=3)
    expected = records(exact, samples, current_device())[-1].loss
    differences = {}
    for compiled in ("true", "false"):
        for way in ("none", "selective", "full"):
            overrides = [*sizes, f"compile={compiled}", f"activation_checkpointing={way}"]
            recipe = wanted.recipe("gpt/125m", overrides)
            loss = records(recipe, samples, current_device())[-1].loss
            differences[f"compile {compiled}, {way}"] = abs(loss / expected - 1)
    return _checked(differences, LOSS_BF16)


def saved_and_loaded(**told: Any) -> Row:
    """A run that is saved after two steps, and one that goes on from there: the state bit by bit,
    and the losses of the steps after it."""
    wanted = Told(**told)
    recipe = wanted.recipe("gpt/125m", [*(() if wanted.is_tiny else SMALL), *EXACT])
    samples = bench_samples(recipe, "full", steps=4)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, lone_group(current_device()):
        storage = Storage(folder)
        divided, optimizer, loop = engine(recipe, samples, current_device())
        run = steps_after(divided, optimizer, loop, samples, 0)
        _, second = next(run), next(run)
        saver = DurableSaver(storage, keep_last=1, keep_best=False, warn=problems.append)
        saver.save(
            training_state(divided.model, optimizer),
            step=2,
            samples=second.samples,
            tokens=second.tokens,
        )
        kept = [tensor.clone() for tensor in tensors(divided, optimizer)]
        saver.wait()
        saver.close()
        through = [record.loss for record in run]
        divided, optimizer, loop = engine(recipe, samples, current_device())
        restore(storage, commits(storage)[0], divided.model, optimizer)
        pairs = zip(tensors(divided, optimizer), kept, strict=True)
        is_equal = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        again = [record.loss for record in steps_after(divided, optimizer, loop, samples, 2)]
    differences = {
        f"loss of step {step}": abs(one / other - 1)
        for step, one, other in zip((3, 4), again, through, strict=True)
    }
    row = _checked(differences, RESTORED)
    return {**row, "state_is_equal": is_equal, "problems": problems} | {
        "is_right": row["is_right"] and is_equal and not problems
    }


def streams(**told: Any) -> Row:
    """Some steps under PyTorch's sanitizer of CUDA streams, which raises where a kernel may read
    what another stream still writes."""
    wanted = Told(**told)
    overrides = ["workload.num_layers=4", "batch_size=4", "micro_batch_tokens=4096"]
    recipe = wanted.recipe("gpt/125m", [*overrides, "compile=false"])
    samples = bench_samples(recipe, "full", steps=3)
    return {"loss": records(recipe, samples, current_device())[-1].loss}


def bert_agrees(*, model: str, lengths: str, **told: Any) -> Row:
    """BERT's losses and gradients, unpadded beside dense, compiled beside eager."""
    wanted = Told(**told)
    sizes = TINY["bert"] if wanted.is_tiny else ("batch_size=16",)
    overrides = [*sizes, *(("compile=false",) if wanted.device == "cpu" else ())]
    checks = check(model, overrides, wanted.lengths(lengths))
    return {"checks": checks, "is_right": not list(failures(model, checks))}


def _checked(differences: dict[str, float], tolerance: float) -> Row:
    """NaN is not right."""
    is_right = all(difference <= tolerance for difference in differences.values())
    return {"differences": differences, "tolerance": tolerance, "is_right": is_right}
