"""Models on one GPU: whether they are right, how fast they are, and how much memory they take.

    python benchmarks/gpu.py bert --lengths wikipedia_lengths_512.json
    python benchmarks/gpu.py gpt
    python benchmarks/gpu.py two_four

Not run on a GPU yet: there was none. `--device cpu --tiny` runs all of it but compilation and what
CUDA does, with tiny models.

Neither a data set, nor Ray, nor MLflow is needed: samples are random tokens, of full length or of
lengths drawn from the histogram of `--lengths` (docs/commands.md). On a GPU every case has a
process of its own. `--parts` runs some parts only, into a file of their own, `--models` some of the
models; `micro_batch_tokens=32768` and the like change the recipes, but not what a part's rows say.
A suite's rows say what is measured, each by `elastrata bench step`, of each of its models:

bert: BERT-base and BERT-large. check: see `bert_check.py`; nothing is measured where it fails.
steps: with the histogram's lengths and with full ones, compiled and not, and BERT-large's
sequences/s over the published ones. padded: the same samples, each padded to 512 positions, with
dense attention. fp32: in place of bf16, not compiled. clip: by way of clipping, and what of it lies
beside other work in one step, see `clip_overlap.py`.

gpt: 125M to 7B. check: the loss of one step as it is measured (bf16, compiled, varlen attention)
beside that in fp32 with dense attention, for the first model. models: each with the first of
`activation_checkpointing` none, selective and full that fits into memory. Of one model:
checkpointing: each of these; micro_batches: smaller and larger ones; eager: not compiled.

two_four: of the widths of GPT-3 XL and GPT-3 6.7B. products: see `two_four_products.py`. steps, of
few layers: dense, with masks alone (the price of zeroing), and with the kernels.

MFU halves attention where it is causal, and does not count what is computed again; its peak is that
of the device for dense bf16. Writes benchmarks/results/gpu_SUITE.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence

import torch
from bert_check import check, failures
from gpu_cases import FULL, NATURAL, Bench, Case, Row, Suite, measured
from harness import parser_of, write_result
from two_four_products import products

from elastrata.bench.step import MFU_CONVENTION
from elastrata.core.device import current_device, device_name, peak_flops
from elastrata.recipe.file import load_recipe

PUBLISHED = {"A100": 281, "H100": 833}
PUBLISHED_WHAT = "BERT-large at 512, per GPU, MLPerf logs v1.1 (A100), v2.1 (H100), with evaluation"
PUBLISHED_MFU = {
    "Megatron-LM, H100": {"1.7B": 0.41, "7B": 0.47, "16B": 0.49},
    "llm-foundry, 8 H100, attention in full": {"760M": 0.379, "1B": 0.418, "7B": 0.464},
}
"""The MFU on several GPUs, as their documentation says; ours is of one."""
AIMS = {"gpt/125m": 0.40, "gpt/760m": 0.45, "gpt/1.3b": 0.50, "gpt/7b": 0.50}
GPT_TOLERANCE = 2e-3
"""The relative difference of the loss; that of `bert_check.py` for bf16."""
BF16, COMPILED, EAGER = "precision=bf16", "compile=true", "compile=false"
CHECKPOINTING = ("none", "selective", "full")
TINY = (
    *("workload.hidden_size=64", "workload.num_layers=2", "workers.threads=1"),
    "data.prepare.tokenizer.vocab_size=1000",
)


def _over_published(case: Case) -> Case:
    """BERT-large's sequences/s over the published ones, whatever the device."""
    if case["model"] != "bert/large" or case["lengths"] != NATURAL:
        return case
    rate = case["sequences_per_second"]["median"]
    ratios = {device: round(rate / published, 3) for device, published in PUBLISHED.items()}
    return {**case, "over_published": ratios}


def _beside_aim(case: Case) -> Case:
    return {**case, "aim": AIMS[case["model"]]} if case["model"] in AIMS else case


def _check_bert(bench: Bench) -> Case:
    found = {
        name: bench.run(check, name, bench.overrides(name, "batch_size=16"), bench.histogram)
        for name in bench.models
    }
    _stop([line for name, checks in found.items() for line in failures(name, checks)])
    return found


def _check_gpt(bench: Bench) -> Case:
    name = bench.models[0]
    fast = (BF16, COMPILED)
    exact = ("precision=fp32", EAGER, "workload.attention=dense")
    low, high = (
        bench.run(measured, load_recipe(name, bench.overrides(name, *way)), FULL, 0, 1)["loss"]
        for way in (fast, exact)
    )
    difference = abs(low / high - 1)
    _stop([] if difference <= GPT_TOLERANCE else [f"{name}: losses differ by {difference:.2g}"])
    return {"difference": difference, "tolerance": GPT_TOLERANCE}


def _stop(wrong: Sequence[str]) -> None:
    if wrong:
        raise SystemExit("\n".join(["not right, nothing is measured:", *wrong]))


def _products(bench: Bench) -> Sequence[Case]:
    return list(_products_of(bench))


def _products_of(bench: Bench) -> Iterator[Case]:
    for model in bench.models:
        recipe = load_recipe(model, bench.overrides(model))
        for case in products(recipe, 1 if bench.is_tiny else 20, bench.run):
            print(json.dumps({"model": model, **case}), flush=True)
            yield {"model": model, **case}


SUITES = {
    "bert": Suite(
        models=("bert/base", "bert/large"),
        tiny_models=("bert/tiny",),
        tiny=(
            *TINY,
            *("workload.embedding_multiple=1", "data.prepare.seq_len=512"),
            *("batch_size=4", "micro_batch_tokens=1024"),
        ),
        warm_up=5,
        steps=20,
        about={"published": {"what": PUBLISHED_WHAT, "sequences_per_second": PUBLISHED}},
        parts={
            "check": _check_bert,
            "steps": [
                Row(overrides=(BF16, compiled), lengths=lengths, beside=_over_published)
                for compiled in (COMPILED, EAGER)
                for lengths in (NATURAL, FULL)
            ],
            "padded": [
                Row(
                    overrides=(BF16, compiled),
                    lengths=NATURAL,
                    is_padded=True,
                    facts={"padded": True},
                )
                for compiled in (COMPILED, EAGER)
            ],
            "fp32": [Row(overrides=("precision=fp32", EAGER), lengths=NATURAL)],
            "clip": [
                Row(
                    overrides=(BF16, COMPILED, f"clip.method={way}"),
                    lengths=NATURAL,
                    is_traced=True,
                    facts={"clip": way},
                )
                for way in ("none", "global_norm", "bucketwise")
            ],
        },
    ),
    "gpt": Suite(
        models=("gpt/125m", "gpt/350m", "gpt/760m", "gpt/1.3b", "gpt/7b"),
        tiny_models=("gpt/125m", "gpt/350m"),
        usual=(BF16,),
        tiny=(
            *TINY,
            *("workload.num_heads=2", "data.prepare.seq_len=64"),
            *("batch_size=4", "micro_batch_tokens=128"),
        ),
        tokens=131_072,  # several micro-batches, so that the update counts as little as in training
        warm_up=3,
        steps=10,
        one="gpt/1.3b",
        about={"published_mfu": PUBLISHED_MFU},
        parts={
            "check": _check_gpt,
            "models": [Row(overrides=(COMPILED,), ways=CHECKPOINTING, beside=_beside_aim)],
            "checkpointing": [
                Row(overrides=(COMPILED,), ways=(way,), is_of_one=True) for way in CHECKPOINTING
            ],
            "micro_batches": [
                Row(
                    overrides=(COMPILED, f"micro_batch_tokens={tokens}"),
                    ways=CHECKPOINTING,
                    is_of_one=True,
                )
                for tokens in (4096, 8192, 16384, 32768)
            ],
            "eager": [Row(overrides=(EAGER,), ways=CHECKPOINTING, is_of_one=True)],
        },
    ),
    "two_four": Suite(
        models=("gpt/1.3b", "gpt/7b"),
        tiny_models=("gpt/1.3b",),
        usual=("workload.num_layers=6", "batch_size=32"),
        tiny=(
            *TINY,
            *("workload.num_heads=2", "workload.max_positions=128", "data.prepare.seq_len=128"),
            *("batch_size=2", "micro_batch_tokens=128", "workload.embedding_multiple=1"),
            "workload.attention=dense",
        ),
        warm_up=3,
        steps=10,
        parts={
            "products": _products,
            "steps": [
                Row(overrides=(compiled, *sparsity), facts={"way": way})
                for compiled in (COMPILED, EAGER)
                for way, sparsity in (
                    ("dense", ()),
                    ("masks", ("sparsity={method: two_four}",)),
                    ("kernels", ("sparsity={method: two_four, kernels: true}",)),
                )
            ],
        },
    ),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of all recipes")
    parser.add_argument("--lengths", metavar="FILE", help="JSON histogram; bert needs it")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--models", help="recipes with commas between, smallest first")
    parser.add_argument("--parts", help="some, with commas between")
    arguments = parser.parse_intermixed_args()
    suite = SUITES[arguments.suite]
    parts = arguments.parts.split(",") if arguments.parts else list(suite.parts)
    if unknown := set(parts) - set(suite.parts):
        expected = ", ".join(suite.parts)
        parser.error(f"--parts: {', '.join(sorted(unknown))}: expected some of {expected}")
    if arguments.suite == "bert" and not arguments.lengths:
        parser.error("bert needs --lengths FILE")
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        parser.error("--device cuda: there is none; --device cpu --tiny tries the script")
    bench = Bench(suite, arguments)
    figures = {
        "device": device_name(current_device()),
        "mfu_convention": MFU_CONVENTION,
        "peak_flops": peak_flops(current_device()),
        "cuda": torch.version.cuda,
        **suite.about,
        **{part: bench.part(suite.parts[part]) for part in suite.parts if part in parts},
    }
    # What did not measure all of it on a GPU goes into a file of another name.
    words = parts if set(parts) != set(suite.parts) else []
    sizes = ["tiny"] * arguments.tiny + ["cpu"] * (arguments.device == "cpu")
    write_result("_".join(["gpu", arguments.suite, *words, *sizes]), figures, ("torch", "numpy"))


if __name__ == "__main__":
    main()
