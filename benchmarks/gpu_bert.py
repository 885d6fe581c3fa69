"""BERT on one GPU: is it right, and how fast is it.

    python benchmarks/gpu_bert.py wikipedia_lengths_512.json

Not run on a GPU yet: there was none. To try all of it but what CUDA does, with a tiny model:

    python benchmarks/gpu_bert.py wikipedia_lengths_512.json --device cpu --tiny

Of that the parts were run one by one, not yet the whole.

The file holds a histogram of lengths, see `--lengths` in docs/commands.md. No data set is needed,
nor Ray, nor MLflow. Every case has a process of its own. `--parts` runs some only, into a file of
their own; `micro_batch_tokens=32768` and the like change the recipes.

check: first, and nothing is measured where it fails; see `bert_check.py`.
steps: `elastrata bench step` of BERT-base and BERT-large with the histogram's lengths and with full
ones, in bf16, compiled and not; BERT-large's sequences/s over the published ones of A100 and H100.
padded: the same model over the same samples, each padded to 512 positions, with dense attention.
fp32: in place of bf16, not compiled.
clip: seconds of a step by way of clipping, in bf16, compiled; and what of clipping lies beside
other work in one step, see `clip_overlap.py`.

Writes benchmarks/results/gpu_bert.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from apart import apart
from bert_check import check, failures
from clip_overlap import clip_overlap
from padded_bert import PaddedBert, attention_by, padded_attention
from report import write_result
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from elastrata.bench.lengths import read_histogram
from elastrata.bench.samples import bench_samples
from elastrata.bench.step import MFU_CONVENTION, measure_steps
from elastrata.core.bucket_clip import RANGE
from elastrata.core.clip import Clip
from elastrata.core.control_signal import Action
from elastrata.core.device import current_device, device_name
from elastrata.core.mesh import lone_group
from elastrata.core.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.engine import divided_model, training_loop
from elastrata_pipelines.batches import Start

PUBLISHED = {"A100": 281, "H100": 833}
PUBLISHED_WHAT = "BERT-large at 512, per GPU, MLPerf logs v1.1 (A100), v2.1 (H100), with evaluation"
PARTS = ("check", "steps", "padded", "fp32", "clip")
WARM_UP, STEPS = 5, 20
PROFILED_AFTER = 3
TINY = (
    *("workload.hidden_size=64", "workload.num_layers=2", "data.prepare.tokenizer.vocab_size=1000"),
    *("workload.embedding_multiple=1", "batch_size=4", "micro_batch_tokens=1024"),
    *("data.prepare.seq_len=512", "workers.threads=1"),
)
CHECKED_SAMPLES = 16


def measured(recipe: Recipe, lengths: str, warm_up: int, steps: int) -> dict[str, Any]:
    """`elastrata bench step`, in a process of its own."""
    return apart(_measure, recipe, lengths, warm_up, steps)


def _measure(recipe: Recipe, lengths: str, warm_up: int, steps: int) -> dict[str, Any]:
    try:
        samples = bench_samples(recipe, lengths, steps=warm_up + steps)
        is_padded = isinstance(recipe.workload, PaddedBert)
        with attention_by(padded_attention) if is_padded else nullcontext():
            found = asdict(measure_steps(recipe, samples, warm_up=warm_up))
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    del found["mfu_convention"]
    return found


def padded(recipe: Recipe, histogram: str) -> Recipe:
    """The same recipe with padded samples, and micro-batches of as many positions."""
    counts = read_histogram(histogram)
    mean = sum(length * count for length, count in enumerate(counts)) / sum(counts)
    length = recipe.workload.max_positions
    budget = max(length, round(recipe.micro_batch_tokens * mean / length))
    workload = PaddedBert(**recipe.workload.model_dump())
    return recipe.model_copy(update={"workload": workload, "micro_batch_tokens": budget})


class RangedClip:
    """A clip whose end, too, has a name in a profile."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip

    def before_backward(self, share: float) -> None:
        self._clip.before_backward(share)

    def after_backward(self) -> Tensor:
        with record_function(RANGE):
            return self._clip.after_backward()


def profiled_clip(recipe: Recipe, lengths: str) -> dict[str, Any]:
    """What of clipping lies beside other work in one step."""
    device, workload = current_device(), recipe.workload
    samples = bench_samples(recipe, lengths, steps=PROFILED_AFTER + 1)
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device.type == "cuda" else []
    with lone_group(device), tempfile.TemporaryDirectory() as folder:
        divided = divided_model(recipe, samples.vocabulary, samples.seq_len, device, 1)
        blocks = workload.blocks(divided.model)
        optimizer = build_optimizer(recipe.optimizer, divided.model, blocks)
        loop = training_loop(recipe, divided.clip, samples.vocabulary, device, 1)
        loop = replace(loop, clip=RangedClip(loop.clip))
        run = loop.run(
            divided.forward_backward, optimizer, samples.steps, Start(), lambda: Action.GO_ON
        )
        for _ in range(PROFILED_AFTER):
            next(run)
        if device.type == "cuda":
            torch.cuda.synchronize()
        with profile(activities=activities) as found:
            next(run)
            if device.type == "cuda":
                torch.cuda.synchronize()
        trace = Path(folder) / "trace.json"
        found.export_chrome_trace(str(trace))
        return clip_overlap(json.loads(trace.read_text())["traceEvents"], RANGE)


class Bench:
    """What is measured of which models, part by part."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.models = ("bert/tiny",) if arguments.tiny else ("bert/base", "bert/large")
        self.overrides = (*(TINY if arguments.tiny else ()), *arguments.overrides)
        self.histogram = str(arguments.histogram)
        self.count = (1, 2) if arguments.tiny else (WARM_UP, STEPS)

    def cases(self, *more: str) -> Iterator[tuple[str, Recipe]]:
        for name in self.models:
            yield name, load_recipe(name, [*self.overrides, *more])

    def case(self, name: str, recipe: Recipe, lengths: str, **facts: Any) -> dict[str, Any]:
        facts = {
            "model": name,
            "lengths": "full" if lengths == "full" else "natural",
            "precision": recipe.precision,
            "compile": recipe.compile,
            "micro_batch_tokens": recipe.micro_batch_tokens,
            **facts,
        }
        found = {**facts, **measured(recipe, lengths, *self.count)}
        print(json.dumps(_short(found)), flush=True)
        return found

    def check(self) -> Any:
        found = {name: self.checked(name) for name in self.models}
        if wrong := [line for name, one in found.items() for line in failures(name, one)]:
            raise SystemExit("\n".join(["not right, nothing is measured:", *wrong]))
        return found

    def checked(self, name: str) -> Any:
        overrides = [*self.overrides, f"batch_size={CHECKED_SAMPLES}"]
        return apart(check, name, overrides, self.histogram)

    def steps(self) -> Any:
        return [
            _beside_published(self.case(name, recipe, lengths))
            for compiled in ("true", "false")
            for name, recipe in self.cases("precision=bf16", f"compile={compiled}")
            for lengths in (self.histogram, "full")
        ]

    def padded(self) -> Any:
        return [
            self.case(name, padded(recipe, self.histogram), self.histogram, padded=True)
            for compiled in ("true", "false")
            for name, recipe in self.cases("precision=bf16", f"compile={compiled}")
        ]

    def fp32(self) -> Any:
        return [
            self.case(name, recipe, self.histogram)
            for name, recipe in self.cases("precision=fp32", "compile=false")
        ]

    def clip(self) -> Any:
        found = []
        for way in ("none", "global_norm", "bucketwise"):
            for name, recipe in self.cases("precision=bf16", "compile=true", f"clip.method={way}"):
                case = self.case(name, recipe, self.histogram, clip=way)
                trace = apart(profiled_clip, recipe, self.histogram)
                found.append({**case, "trace": trace})
        return found


def _beside_published(case: dict[str, Any]) -> dict[str, Any]:
    """BERT-large's sequences/s over the published ones, whatever the device."""
    if case["model"] != "bert/large" or case["lengths"] != "natural" or "error" in case:
        return case
    rate = case["sequences_per_second"]["median"]
    ratios = {device: round(rate / published, 3) for device, published in PUBLISHED.items()}
    return {**case, "over_published": ratios}


def _short(case: dict[str, Any]) -> dict[str, Any]:
    """A line of a case, while others are measured."""
    medians = {
        key: case[key] and case[key]["median"]
        for key in ("sequences_per_second", "mfu", "seconds")
        if key in case
    }
    return {**{k: v for k, v in case.items() if isinstance(v, str | bool)}, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("histogram", type=Path, help="JSON file of lengths")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all recipes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few steps")
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
        "published": {"what": PUBLISHED_WHAT, "sequences_per_second": PUBLISHED},
        "cuda": torch.version.cuda,
        **{part: getattr(bench, part)() for part in PARTS if part in parts},
    }
    write_result(_result_name(arguments, parts), figures, ("torch", "numpy"))


def _result_name(arguments: argparse.Namespace, parts: list[str]) -> str:
    """What did not measure all of it on a GPU goes into a file of another name."""
    return "_".join(
        [
            "gpu_bert",
            *(parts if set(parts) != set(PARTS) else []),
            *(["tiny"] if arguments.tiny else []),
            *(["cpu"] if arguments.device == "cpu" else []),
        ]
    )


if __name__ == "__main__":
    main()
