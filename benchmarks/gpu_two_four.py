"""2:4 sparsity on one GPU: what its kernels gain, in a matrix product and in a whole step.

    python benchmarks/gpu_two_four.py

Not run on a GPU yet: there was none. To try all but the kernels, with a tiny model:

    python benchmarks/gpu_two_four.py --device cpu --tiny

products: every layer of GPT-3 XL and GPT-3 6.7B, in bf16, over the tokens of a micro-batch: forward
dense, forward with the weight compressed before, compressing it, and forward and backward dense and
with a weight that is compressed anew, as training has to. Once with each library that PyTorch
calls, cuSPARSELt and CUTLASS.
steps: `elastrata bench step` of models of these widths, of as few layers as `--layers` says: dense,
with masks alone (the price of zeroing), and with the kernels; each compiled and not.

Writes benchmarks/results/gpu_two_four.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from apart import apart
from report import write_result
from torch import Tensor
from torch.sparse import SparseSemiStructuredTensor

from elastrata.bench.samples import bench_samples
from elastrata.bench.step import measure_steps
from elastrata.core.device import current_device, device_name
from elastrata.core.sparsity.config import TwoFourConfig
from elastrata.core.sparsity.draw import drawn
from elastrata.core.sparsity.kernels import SemiStructured, compressed
from elastrata.core.sparsity.layers import layer_shapes
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError

MODELS = ("gpt/1.3b", "gpt/7b")
PARTS = ("products", "steps")
WAYS = {
    "dense": [],
    "masks": ["sparsity={method: two_four}"],
    "kernels": ["sparsity={method: two_four, kernels: true}"],
}
LIBRARIES = {"cusparselt": False, "cutlass": True}
ROUNDS, REPEATS, WARM_UP, STEPS, SAMPLES = 9, 20, 3, 10, 32
TINY = (
    *("workload.hidden_size=64", "workload.num_layers=1", "workload.num_heads=2"),
    *("workload.max_positions=128", "data.prepare.seq_len=128", "batch_size=2"),
    *("micro_batch_tokens=128", "data.prepare.tokenizer.vocab_size=500", "workers.threads=1"),
    *("workload.embedding_multiple=1", "workload.attention=dense", "compile=false"),
)


def seconds_of(function: Callable[[], Any], repeats: int) -> float:
    """Of one call, from the median of several rounds."""
    found = []
    for number in range(ROUNDS + 1):
        _wait()
        began = time.perf_counter()
        for _ in range(repeats):
            function()
        _wait()
        if number:  # the first warms up
            found.append((time.perf_counter() - began) / repeats)
    return statistics.median(found)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def products_of(
    rows: int, columns: int, tokens: int, library: str, repeats: int
) -> dict[str, float]:
    """Seconds of one layer's products, in a process of its own."""
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
        found = {
            "dense_forward": seconds_of(lambda: F.linear(inputs, weight), repeats),
            "sparse_forward": seconds_of(lambda: F.linear(inputs, packed), repeats),
            "compress": seconds_of(lambda: _packed(weight), repeats),
        }
    found["dense_forward_backward"] = seconds_of(both(F.linear), repeats)
    found["sparse_forward_backward"] = seconds_of(both(_sparse), repeats)
    return {**found, "largest_difference": float(error.max())}


def _sparse(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = SemiStructured.apply(inputs, weight, bias, _packed)  # type: ignore[no-untyped-call]
    return out


def _packed(weight: Tensor) -> Tensor:
    """What the kernels multiply; the weight itself on a CPU, which has none."""
    return weight if weight.device.type == "cpu" else compressed(weight)


def step_of(recipe: Recipe, warm_up: int, steps: int) -> dict[str, Any]:
    """`elastrata bench step` in a process of its own."""
    try:
        samples = bench_samples(recipe, "full", steps=warm_up + steps)
        found = asdict(measure_steps(recipe, samples, warm_up=warm_up))
    except (torch.OutOfMemoryError, RuntimeError, UserError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    del found["mfu_convention"]
    return found


class Bench:
    """What is measured of which models."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tiny = arguments.tiny
        self.models = MODELS[:1] if self.tiny else MODELS
        self.smaller = (f"workload.num_layers={arguments.layers}", f"batch_size={SAMPLES}")
        self.counts = (1, 1) if self.tiny else (WARM_UP, STEPS)

    def recipe(self, model: str, *overrides: str) -> Recipe:
        return load_recipe(model, [*overrides, *(TINY if self.tiny else self.smaller)])

    def products(self) -> list[dict[str, Any]]:
        return [case for model in self.models for case in self._products(model)]

    def _products(self, model: str) -> Iterator[dict[str, Any]]:
        recipe = self.recipe(model)
        shapes = {shape: name for name, shape in reversed(layer_shapes(recipe.workload).items())}
        tokens, repeats = recipe.micro_batch_tokens, 1 if self.tiny else REPEATS
        for (rows, columns), name in shapes.items():
            for library in LIBRARIES:
                found = apart(products_of, rows, columns, tokens, library, repeats)
                case = {
                    **{"model": model, "layer": name.partition(".")[2].partition(".")[2]},
                    **{"rows": rows, "columns": columns, "tokens": tokens, "library": library},
                    "seconds": {key: float(f"{value:.4g}") for key, value in found.items()},
                    "forward_times_faster": _ratio(found, "forward"),
                    "forward_backward_times_faster": _ratio(found, "forward_backward"),
                }
                print(json.dumps(case), flush=True)
                yield case

    def steps(self) -> list[dict[str, Any]]:
        found = []
        for model in self.models:
            for compiled in ("false",) if self.tiny else ("true", "false"):
                for way, sparsity in WAYS.items():
                    recipe = self.recipe(model, f"compile={compiled}", *sparsity)
                    case = {
                        **{"model": model, "layers": recipe.workload.num_layers},
                        **{"way": way, "compile": compiled == "true"},
                        **apart(step_of, recipe, *self.counts),
                    }
                    print(json.dumps({k: case.get(k) for k in (*case, "seconds")}), flush=True)
                    found.append(case)
        return found


def _ratio(seconds: dict[str, float], what: str) -> float:
    return round(seconds[f"dense_{what}"] / seconds[f"sparse_{what}"], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--layers", type=int, default=6, help="of the models whose steps are timed")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        parser.error("--device cuda: there is none; --device cpu --tiny tries the script")
    bench = Bench(arguments)
    figures = {
        "device": device_name(current_device()),
        "cuda": torch.version.cuda,
        **{part: getattr(bench, part)() for part in PARTS if part in parts},
    }
    name = "_".join(
        [
            "gpu_two_four",
            *(parts if set(parts) != set(PARTS) else []),
            *(["tiny"] if arguments.tiny else []),
            *(["cpu"] if arguments.device == "cpu" else []),
        ]
    )
    write_result(name, figures, ("torch", "numpy"))


if __name__ == "__main__":
    main()
