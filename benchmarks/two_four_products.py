"""The gain of the kernels of 2:4 sparsity in a matrix product.

Every layer of a model in bf16 over the tokens of a micro-batch: forward dense, forward with the
weight compressed before, compressing it, and forward and backward dense and with a weight that is
compressed anew, as training has to. Once with each library that PyTorch calls, cuSPARSELt and
CUTLASS.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor

from elastrata.core.device import current_device
from elastrata.core.sparsity.config import TwoFourConfig
from elastrata.core.sparsity.draw import drawn
from elastrata.core.sparsity.kernels import SemiStructured, compressed
from elastrata.core.sparsity.layers import layer_shapes
from elastrata.recipe.recipe import Recipe

LIBRARIES = {"cusparselt": False, "cutlass": True}
ROUNDS = 9


def products(
    recipe: Recipe, repeats: int, run: Callable[..., dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """A case for every shape of layer and library.

    Args:
        recipe: its model and the tokens of its micro-batches.
        repeats: calls that are timed together.
        run: calls `products_of` with its arguments, in a process of its own or not.
    """
    shapes = {shape: name for name, shape in reversed(layer_shapes(recipe.workload).items())}
    tokens = recipe.micro_batch_tokens
    for (rows, columns), name in shapes.items():
        for library in LIBRARIES:
            seconds = run(products_of, rows, columns, tokens, library, repeats)
            yield {
                **{"layer": name.partition(".")[2].partition(".")[2]},
                **{"rows": rows, "columns": columns, "tokens": tokens, "library": library},
                "seconds": {key: float(f"{value:.4g}") for key, value in seconds.items()},
                "forward_times_faster": _ratio(seconds, "forward"),
                "forward_backward_times_faster": _ratio(seconds, "forward_backward"),
            }


def _ratio(seconds: dict[str, float], what: str) -> float:
    return round(seconds[f"dense_{what}"] / seconds[f"sparse_{what}"], 3)


def products_of(
    rows: int, columns: int, tokens: int, library: str, repeats: int
) -> dict[str, float]:
    """Seconds of one layer's products."""
    SparseSemiStructuredTensor._FORCE_CUTLASS = LIBRARIES[library]
    device = current_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weight = torch.randn(rows, columns, device=device, dtype=dtype) / columns**0.5
    zero = drawn(TwoFourConfig(method="two_four"), {"layer": weight}, {"layer": 0.5}, seed=0)
    weight.masked_fill_(zero["layer"], 0.0).requires_grad_()
    inputs = torch.randn(tokens, columns, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, rows, device=device, dtype=dtype)
    packed = _packed(weight.detach())
    error = (F.linear(inputs.detach(), packed) - F.linear(inputs.detach(), weight.detach())).abs()

    def both(forward: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(
            forward(inputs, weight, None), (inputs, weight), gradient, allow_unused=True
        )

    with torch.no_grad():
        seconds = {
            "dense_forward": seconds_of(lambda: F.linear(inputs, weight), repeats),
            "sparse_forward": seconds_of(lambda: F.linear(inputs, packed), repeats),
            "compress": seconds_of(lambda: _packed(weight), repeats),
        }
    seconds["dense_forward_backward"] = seconds_of(both(F.linear), repeats)
    seconds["sparse_forward_backward"] = seconds_of(both(_sparse), repeats)
    return {**seconds, "largest_difference": float(error.max())}


def _sparse(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, weight, bias, _packed)  # type: ignore[no-untyped-call]
    return out


def _packed(weight: Tensor) -> Tensor:
    """The weight that the kernels multiply; the weight itself on a CPU, which has none."""
    return weight if weight.device.type == "cpu" else compressed(weight)


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """The seconds of one call: the median of several rounds."""
    rounds = []
    for number in range(ROUNDS + 1):
        _wait()
        began = time.perf_counter()
        for _ in range(repeats):
            function()
        _wait()
        if number:  # the first warms up
            rounds.append((time.perf_counter() - began) / repeats)
    return statistics.median(rounds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
