"""Whether BERT computes what it should on this device, in bf16 and in fp32.

Attention alone and the whole model: unpadded against dense attention, and compiled against eager.
Differences are relative 2-norms, at most `TOLERANCES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from padded_bert import Attention, attention_by, dense_attention
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastrata.bench.samples import Samples, bench_samples
from elastrata.core.device import current_device
from elastrata.core.forward_backward import weighted
from elastrata.core.mesh import lone_group
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.engine import divided_model
from elastrata_workloads.unpadded.attention import attention
from elastrata_workloads.unpadded.batch import Segments

ATTENDING = ".attention.self."
"""In the names of the parameters that make query, key and value."""
TOLERANCES = {
    "attention bf16": 1e-2,
    "loss bf16": 2e-3,
    "gradient bf16": 5e-2,
    "attention fp32": 1e-5,
    "loss fp32": 1e-5,
    "gradient fp32": 1e-4,
}
"""Seen on a CPU: attention 2e-3 in bf16; gradients of 24 layers in bf16 3e-2 from those in fp32,
which bounds what compilation may change; in fp32 4e-7, where one sample of eight that attends to
its neighbour, too, made 4e-2 to 8e-2. So bf16 shows gross mistakes of the model, attention alone
and fp32 the fine ones."""


def check(name: str, overrides: Sequence[str], lengths: str) -> dict[str, Any]:
    """All differences of a recipe's first step, each with its tolerance.

    Args:
        name: of the recipe.
        overrides: of its keys; with as many samples as are to be looked at.
        lengths: see `bench_samples`.
    """
    recipe = _with_sharp_attention(load_recipe(name, overrides))
    bert, samples = recipe.workload, bench_samples(recipe, lengths, steps=1)
    differences = {
        **check_attention(
            tuple(samples.steps[0].rows.lengths.tolist()),
            bert.num_heads,
            bert.hidden_size // bert.num_heads,
        ),
        **check_model(recipe, samples),
    }
    return {
        what: {"difference": value, "tolerance": TOLERANCES[what.split(",")[0]]}
        for what, value in differences.items()
    }


def _with_sharp_attention(recipe: Recipe) -> Recipe:
    """Initial weights so large that scores differ by about 1; else all tokens count alike, and a
    mistake hardly shows."""
    spread = recipe.workload.hidden_size**-0.5
    workload = recipe.workload.model_copy(update={"initializer_range": spread})
    return recipe.model_copy(update={"workload": workload})


def failures(name: str, checks: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """A line for each difference above its tolerance; one that is not a number is."""
    for what, one in checks.items():
        if not one["difference"] <= one["tolerance"]:
            limit = f"expected at most {one['tolerance']:g}"
            yield f"{name}: {what}: {one['difference']:.3g}, {limit}"


def relative(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The 2-norm of all differences over that of all that is wanted."""
    differences = torch.stack([(f - w).norm() for f, w in zip(found, wanted, strict=True)])
    return float((differences.norm() / torch.stack([w.norm() for w in wanted]).norm()).detach())


def attention_and_gradients(
    form: Attention, inputs: list[Tensor], segments: Segments, dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of query, key and value."""
    query, key, value, weight = (x.to(dtype) for x in inputs)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = form(*leaves, segments)
    return [x.float() for x in (out, *torch.autograd.grad(out, leaves, weight))]


def check_attention(lengths: tuple[int, ...], heads: int, head_size: int) -> dict[str, float]:
    """Unpadded attention beside dense attention, each of the four tensors by itself."""
    device = current_device()
    torch.manual_seed(0)
    shape = (sum(lengths), heads, head_size)
    inputs = [torch.randn(shape, device=device) for _ in range(4)]
    ends = torch.tensor(lengths).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    segments = Segments(offsets, lengths, max(lengths))
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        ours, dense = (
            attention_and_gradients(form, inputs, segments, dtype)
            for form in (attention, dense_attention)
        )
        found[f"attention {name}"] = max(
            relative([one], [other]) for one, other in zip(ours, dense, strict=True)
        )
    return found


def loss_and_gradients(
    recipe: Recipe, samples: Samples, form: Attention = attention
) -> tuple[float, list[Tensor]]:
    """The loss of the first step, and the gradients of the weights of query, key and value, which
    show a mistake in attention best; through the engine's sharded model."""
    device, workload = current_device(), recipe.workload
    with lone_group(device), attention_by(form):
        model = divided_model(recipe, samples.vocabulary, samples.seq_len, device, 1).model
        batches = [
            workload.collate(rows, samples.vocabulary, recipe.seed).to(device)
            for rows in samples.steps[0].micro_batches
        ]
        weights = {"mlm": sum(batch.weights["mlm"] for batch in batches)}
        loss = 0.0
        for batch in batches:
            part = weighted(workload.loss(model, batch), weights)
            part.backward()
            loss += float(part.detach())
        return loss, [
            _whole(p.grad).cpu()
            for name, p in model.named_parameters()
            if ATTENDING in name and name.endswith("weight") and p.grad is not None
        ]


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def check_model(recipe: Recipe, samples: Samples) -> dict[str, float]:
    """Loss and gradient of the first step, computed in other ways, and how far they are apart."""
    found = {}
    for precision in ("bf16", "fp32"):
        eager = recipe.model_copy(update={"precision": precision, "compile": False})
        loss, gradients = loss_and_gradients(eager, samples)
        compiled = eager.model_copy(update={"compile": True})
        others = {
            "unpadded against dense": loss_and_gradients(eager, samples, dense_attention),
            "eager against compiled": loss_and_gradients(compiled, samples),
        }
        for what, (other_loss, other_gradients) in others.items():
            found[f"loss {precision}, {what}"] = abs(loss - other_loss) / other_loss
            found[f"gradient {precision}, {what}"] = relative(gradients, other_gradients)
    return found
