"""GPT on one GPU: tokens/s, MFU and memory of the sizes from 125M to 7B.

    python benchmarks/gpu_gpt.py

Not run on a GPU yet: there was none. To run all of it but compilation and what CUDA does, with tiny
models:

    python benchmarks/gpu_gpt.py --device cpu --tiny

No data set is needed, nor Ray, nor MLflow: samples are random tokens, all of full length. On a GPU
every case has a process of its own. `--parts` runs some only, into a file of their own, `--models`
some of the models; `micro_batch_tokens=32768` and the like change the recipes, but not what is
given below for a part.

check: first, and nothing is measured where it fails: the loss of one step as it is measured (bf16,
compiled, varlen attention) beside that in fp32 with dense attention, for the smallest model.
models: `elastrata bench step` of the recipes gpt/125m, 350m, 760m, 1.3b and 7b in bf16, compiled,
each with the first of `activation_checkpointing` none, selective and full that fits into memory.
checkpointing: one model each of these ways.
micro_batches: the same model with smaller and larger micro-batches.
eager: not compiled.

MFU halves attention, which is causal, and does not count what is computed again; its peak is that
of the device for dense bf16, 989 TFLOP/s for an H100 SXM or an H200.

Writes benchmarks/results/gpu_gpt.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from apart import apart
from report import write_result

from elastrata.bench.samples import bench_samples
from elastrata.bench.step import MFU_CONVENTION, measure_steps
from elastrata.core.device import current_device, device_name, peak_flops
from elastrata.recipe.file import load_recipe

MODELS = ("gpt/125m", "gpt/350m", "gpt/760m", "gpt/1.3b", "gpt/7b")
PUBLISHED = {
    "Megatron-LM, H100": {"1.7B": 0.41, "7B": 0.47, "16B": 0.49},
    "llm-foundry, 8 H100, attention in full": {"760M": 0.379, "1B": 0.418, "7B": 0.464},
}
"""MFU of several GPUs, as their documentation says; ours is of one."""
AIMS = {"gpt/125m": 0.40, "gpt/760m": 0.45, "gpt/1.3b": 0.50, "gpt/7b": 0.50}
PARTS = ("check", "models", "checkpointing", "micro_batches", "eager")
WAYS = ("none", "selective", "full")
WARM_UP, STEPS = 3, 10
TOKENS = 131_072
"""Of a step: several micro-batches, so that the update counts as little as in training."""
MICRO_BATCHES = (4096, 8192, 16384, 32768)
TINY = (
    *("workload.hidden_size=64", "workload.num_layers=2", "workload.num_heads=2"),
    *("data.prepare.tokenizer.vocab_size=1000", "data.prepare.seq_len=64", "workers.threads=1"),
)
TINY_TOKENS, TINY_MICRO_BATCHES = 256, (64,)
CHECKED_TOLERANCE = 2e-3
"""Of the loss, relative; that of `bert_check.py` for bf16."""
OUT_OF_MEMORY = "out of memory"


def measured(name: str, overrides: Sequence[str], warm_up: int, steps: int) -> dict[str, Any]:
    """`elastrata bench step` of a recipe."""
    recipe = load_recipe(name, list(overrides))
    try:
        samples = bench_samples(recipe, "full", steps=warm_up + steps)
        found = asdict(measure_steps(recipe, samples, warm_up=warm_up))
    except torch.OutOfMemoryError:
        return {"error": OUT_OF_MEMORY}
    del found["mfu_convention"]
    return found


class Bench:
    """What is measured of which models, part by part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._is_tiny = arguments.tiny
        self._models = ("gpt/125m", "gpt/350m") if arguments.tiny else arguments.models.split(",")
        self._micro_batches = TINY_MICRO_BATCHES if arguments.tiny else MICRO_BATCHES
        self._count = (1, 1) if arguments.tiny else (WARM_UP, STEPS)
        self._overrides = tuple(arguments.overrides)
        on_cpu = arguments.device == "cpu"
        # On a CPU, compilation takes minutes and is not what is tried.
        self._compiled = "compile=false" if on_cpu else "compile=true"
        self._apart = _here if on_cpu else apart

    def check(self) -> Any:
        low, exact = (
            self._case(self._models[0], *as_measured, count=(0, 1))
            for as_measured in (
                ("precision=bf16", self._compiled),
                ("precision=fp32", "compile=false", "workload.attention=dense"),
            )
        )
        difference = abs(low["loss"] / exact["loss"] - 1)
        if not difference <= CHECKED_TOLERANCE:
            raise SystemExit(f"not right, nothing is measured: losses differ by {difference:.2g}")
        return {"difference": difference, "tolerance": CHECKED_TOLERANCE}

    def models(self) -> Any:
        return [_beside_aim(self._first_that_fits(name, self._compiled)) for name in self._models]

    def checkpointing(self) -> Any:
        return [self._case(self._one, self._compiled, _checkpointing(way)) for way in WAYS]

    def micro_batches(self) -> Any:
        return [
            self._first_that_fits(self._one, self._compiled, f"micro_batch_tokens={tokens}")
            for tokens in self._micro_batches
        ]

    def eager(self) -> Any:
        return [self._first_that_fits(self._one, "compile=false")]

    @property
    def _one(self) -> str:
        """The largest model that should fit beside its optimizer into 80 GB."""
        return "gpt/1.3b" if "gpt/1.3b" in self._models else self._models[-1]

    def _first_that_fits(self, name: str, *overrides: str) -> dict[str, Any]:
        for way in WAYS:
            case = self._case(name, _checkpointing(way), *overrides)
            if "error" not in case:
                break
        return case

    def _case(
        self, name: str, *overrides: str, count: tuple[int, int] | None = None
    ) -> dict[str, Any]:
        """One measurement."""
        given = [*self._usual(name), *self._overrides, *overrides]
        recipe = load_recipe(name, given)
        facts = {
            "model": name,
            "precision": recipe.precision,
            "compile": recipe.compile,
            "activation_checkpointing": recipe.activation_checkpointing,
            "micro_batch_tokens": recipe.micro_batch_tokens,
        }
        found = {**facts, **self._apart(measured, name, given, *(count or self._count))}
        print(json.dumps(_short(found)), flush=True)
        return found

    def _usual(self, name: str) -> list[str]:
        """A step of so many tokens; where it is tiny, of a tiny model."""
        if self._is_tiny:
            sizes = (f"batch_size={TINY_TOKENS // 64}", f"micro_batch_tokens={TINY_TOKENS // 2}")
            return [*TINY, *sizes, "precision=bf16"]
        seq_len = load_recipe(name, []).data.prepare.seq_len
        return [f"batch_size={TOKENS // seq_len}", "precision=bf16"]


def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _checkpointing(way: str) -> str:
    return f"activation_checkpointing={way}"


def _beside_aim(case: dict[str, Any]) -> dict[str, Any]:
    return {**case, "aim": AIMS[case["model"]]} if case["model"] in AIMS else case


def _short(case: dict[str, Any]) -> dict[str, Any]:
    """A line of a case, while others are measured."""
    medians = {
        key: case[key] and case[key]["median"]
        for key in ("tokens_per_second", "mfu", "seconds")
        if key in case
    }
    shown = {key: value for key, value in case.items() if isinstance(value, str | bool)}
    return {**shown, **medians, "peak_memory_bytes": case.get("peak_memory_bytes")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all recipes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--models", default=",".join(MODELS), help="recipes, smallest first")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    arguments = parser.parse_intermixed_args()
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
        "mfu_convention": MFU_CONVENTION,
        "peak_flops": peak_flops(current_device()),
        "published_mfu": PUBLISHED,
        "cuda": torch.version.cuda,
        **{part: getattr(bench, part)() for part in PARTS if part in parts},
    }
    write_result(_result_name(arguments, parts), figures, ("torch", "numpy"))


def _result_name(arguments: argparse.Namespace, parts: list[str]) -> str:
    """What did not measure all of it on a GPU goes into a file of another name."""
    return "_".join(
        [
            "gpu_gpt",
            *(parts if set(parts) != set(PARTS) else []),
            *(["tiny"] if arguments.tiny else []),
            *(["cpu"] if arguments.device == "cpu" else []),
        ]
    )


if __name__ == "__main__":
    main()
