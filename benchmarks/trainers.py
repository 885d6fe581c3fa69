r"""Useful tokens per second of a training run, compared with other trainers.

    python -m venv ../rivals
    ../rivals/bin/pip install torch==2.13.0 transformers==5.23.0 accelerate==1.15.0
    python -m venv ../composer
    ../composer/bin/pip install torch==2.13.0 torchvision==0.28.0 transformers==5.23.0 \
        torchmetrics==1.7.4 torch_optimizer==0.3.0 mosaicml-cli==0.7.5 coolname tabulate \
        py-cpuinfo "importlib-metadata<9" psutil
    ../composer/bin/pip install --no-deps mosaicml==0.32.1
    python benchmarks/trainers.py ../shared/data/wikitext \
        --python ../rivals/bin/python --composer ../composer/bin/python

Composer's newest release requires torch before 2.7.1. Without its dependencies it can be installed
with the torch version of the other trainers, and trains.

All train BERT-mini from the same weights, on the same samples: WikiText's articles and the files of
this Python's standard library, up to 512 tokens, at their natural lengths, with a WordPiece
vocabulary of 8,192. Nearly all of these are cut at 512; `--documents paragraph` uses their
paragraphs, most of them short. Batch size, fused AdamW, schedule, clipping and share of masked
tokens are equal; fp32, one thread, Ray's niceness. The rivals' batches are random and padded to
their longest sample, and they use PyTorch's fused attention. Elastrata runs as `elastrata train`;
its data pipeline, history and MLflow are included in the time. It runs with one worker, and with
two whose parameters are sharded, sharded and gathered once per step, or replicated.

Trainers are measured by turns, each run in a new process: real tokens over the seconds between the
ends of the same steps, without start and warm-up. Ratios are medians over rounds.

`--scratch DIR` keeps data and rounds; a later call adds its rounds to them. Writes
`results/trainers.json`, or `trainers-paragraphs.json`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data_loading import write_arrays
from engine import NICENESS
from harness import (
    VOCABULARY,
    Documents,
    last_line,
    parser_of,
    prepare,
    scratch_folder,
    sources,
    trained_steps,
    versions_in,
    write_result,
)

from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.storage import Storage
from elastrata_workloads.unpadded.masked_lm import MaskedTransformer

STEPS, WARM_UP, BATCH_SIZE, ROUNDS = 8, 2, 16, 3
RIVALS = {
    "Hugging Face Trainer": ("huggingface", "default"),
    "Hugging Face Trainer, grouped by length": ("huggingface", "grouped by length"),
    "Accelerate, a loop by hand": ("accelerate_loop", "by hand"),
    "Composer": ("composer_trainer", "default"),
}
"""A trainer of rival_trainers.py and one of its variants, by display name."""
RESULT = {"whole": "trainers", "paragraph": "trainers-paragraphs"}
"""Name of the result, by unit of a document."""
OURS = {
    "Elastrata, 1 worker": (1, ()),
    "Elastrata, 2 workers": (2, ()),
    "Elastrata, 2 workers, parameters kept": (2, ("parallel.reshard_after_forward=false",)),
    "Elastrata, 2 workers, a copy each": (2, ("parallel.replicate=all",)),
}
"""Number of workers and overrides of the recipe, by display name."""
ONE, *TWO = OURS
DEFAULT = next(iter(RIVALS))
PACKAGES = ("torch", "transformers", "accelerate")
COMPOSER_PACKAGES = ("torch", "transformers", "mosaicml")
Step = dict[str, float]
"""Real tokens of a step, its computed positions, its FLOPs, and its end time in seconds."""


@dataclass(frozen=True)
class Bench:
    """Data and Python environments of the trainers."""

    scratch: Path
    rivals: Path
    """Python of the environment with all rivals except Composer."""
    composer: Path
    """Python of the environment with Composer."""

    @property
    def recipe_path(self) -> Path:
        return self.scratch / "recipe.yaml"

    def recipe(self, seed: int) -> Recipe:
        return load_recipe(str(self.recipe_path), [f"seed={seed}"])

    def steps(self, trainer: str, seed: int) -> list[Step]:
        """Train once from the beginning and return the steps."""
        if trainer in OURS:
            return self.our_steps(*OURS[trainer], seed)
        return self.rival_steps(RIVALS[trainer], seed)

    def our_steps(self, workers: int, changes: Sequence[str], seed: int) -> list[Step]:
        size = (f"workers.min={workers}", f"workers.max={workers}")
        steps = trained_steps(str(self.recipe_path), f"seed={seed}", *size, *changes)
        return [
            {
                "tokens": step["batch_tokens"],
                "positions": step["batch_tokens"] / (1 - step["padding"]),
                "flops": step["flops"],
                "ended": step["time"],
            }
            for step in steps
        ]

    def rival_steps(self, rival: tuple[str, str], seed: int) -> list[Step]:
        recipe = self.recipe(seed)
        python = self.composer if rival == RIVALS["Composer"] else self.rivals
        script = Path(__file__).with_name("rival_trainers.py")
        output = last_line(
            # At the niceness of Elastrata's workers.
            ["nice", "-n", NICENESS, python, script, *rival, self.scratch, settings(recipe)]
        )
        return [
            {
                "tokens": tokens,
                "positions": BATCH_SIZE * length,
                "flops": padded_flops(recipe, length),
                "ended": end_time,
            }
            for tokens, length, end_time in zip(
                # A prefetched batch may have been collated after the last step.
                output["tokens"],
                output["lengths"],
                output["seconds"],
                strict=False,
            )
        ]


def settings(recipe: Recipe) -> str:
    """Return the recipe's values as the rivals' `Settings`, in JSON."""
    optimizer, workload = recipe.optimizer, recipe.workload
    assert isinstance(workload, MaskedTransformer)
    return json.dumps(
        {
            "steps": recipe.steps,
            "batch_size": recipe.batch_size,
            "seed": recipe.seed,
            "mask_probability": workload.mask_probability,
            "lr": optimizer.lr,
            "betas": optimizer.betas,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "warmup_steps": recipe.schedule.warmup_steps,
            "max_norm": recipe.clip.max_norm,
        }
    )


def padded_flops(recipe: Recipe, length: int) -> int:
    """Return the FLOPs of a padded batch.

    Every position attends to all of its row and goes through the head.
    """
    workload = recipe.workload
    assert isinstance(workload, MaskedTransformer)
    spec = workload.model_spec(find_training_data(recipe).train.manifest.vocabulary, length)
    return int(spec.training_flops([length] * BATCH_SIZE, BATCH_SIZE * length))


def prepare_all(wikitext: Path, scratch: Path, documents: Documents) -> None:
    """Prepare the recipe, data and model that the trainers need."""
    prepared = {
        "sources": sources(wikitext, scratch / "python", documents),
        "tokenizer": {"vocab_size": VOCABULARY},
        "seq_len": 512,
        "held_out": None,
    }
    prepare_trainers(scratch, "bert/mini", prepared, {"steps": STEPS})


def prepare_trainers(
    scratch: Path, base: str, prepared: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Write the recipe and, if missing, the data set, its plain arrays and the untrained model.

    Args:
        scratch: output folder.
        base: recipe to extend.
        prepared: value of `data.prepare`.
        changes: other keys of the recipe.
    """
    data = scratch / "data"
    values = {
        "extends": base,
        "data": {"path": str(data), "prepare": prepared},
        "batch_size": BATCH_SIZE,
        "schedule": {"warmup_steps": 2},
        # No checkpoint within the measured steps.
        "checkpoint": {"every": 1000},
        # Spare workers would compete for the cores.
        "workers": {"threads": 1, "spares": False},
        **changes,
    }
    prepare(scratch / "recipe.yaml", values)
    if not (scratch / "memmap").exists():
        write_arrays(data, scratch / "memmap")
    recipe = load_recipe(str(scratch / "recipe.yaml"), [])
    manifest = find_training_data(recipe).train.manifest
    torch.manual_seed(recipe.seed)
    model = recipe.workload.build_model(manifest.vocabulary, manifest.seq_len)
    recipe.workload.export(
        model.state_dict(),
        manifest.vocabulary,
        manifest.seq_len,
        data / "tokenizer",
        scratch / "model",
    )


def measured(steps: Sequence[Step]) -> dict[str, float]:
    """Return the figures of one run, without its warm-up and its last step."""
    counted_steps = steps[WARM_UP:-1]
    tokens = sum(step["tokens"] for step in counted_steps)
    seconds = counted_steps[-1]["ended"] - steps[WARM_UP - 1]["ended"]
    return {
        "tokens_per_second": tokens / seconds,
        "tokens": tokens,
        "padding": 1 - tokens / sum(step["positions"] for step in counted_steps),
        "flops_per_token": sum(step["flops"] for step in counted_steps) / tokens,
    }


def measure(
    bench: Bench, rounds: int, trainers: Sequence[str] = (*RIVALS, *OURS)
) -> list[dict[str, dict[str, float]]]:
    """Run rounds of trainers by turns; return these and the rounds kept from earlier calls."""
    rounds_path = bench.scratch / "rounds.json"
    all_rounds = json.loads(rounds_path.read_text(encoding="utf-8")) if rounds_path.exists() else []
    for _ in range(rounds):
        figures = {}
        for trainer in trainers:
            # Every round has another seed, so other batches.
            figures[trainer] = measured(bench.steps(trainer, seed=len(all_rounds)))
            figures[trainer]["load"] = os.getloadavg()[0]
            print(f"{trainer}: {figures[trainer]['tokens_per_second']:.0f} tokens/s", flush=True)
        all_rounds.append(figures)
        rounds_path.write_text(json.dumps(all_rounds), encoding="utf-8")
    return all_rounds


def row(trainer: str, rounds: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    rounds = [figures for figures in rounds if trainer in figures]

    def median(key: str) -> float:
        return statistics.median(figures[trainer][key] for figures in rounds)

    return {
        "trainer": trainer,
        "useful_tokens_per_second": round(median("tokens_per_second")),
        "rounds": [round(figures[trainer]["tokens_per_second"]) for figures in rounds],
        "load_after_each_round": [
            round(figures[trainer]["load"], 2) for figures in rounds if "load" in figures[trainer]
        ],
        "tokens_measured": round(median("tokens")),
        "padding": round(median("padding"), 4),
        "megaflops_per_useful_token": round(median("flops_per_token") / 1e6, 2),
        "gigaflops_per_second": round(
            median("tokens_per_second") * median("flops_per_token") / 1e9, 1
        ),
    }


def ratio(
    one: str, others: Sequence[str], rounds: Sequence[dict[str, dict[str, float]]]
) -> dict[str, Any]:
    """Return the speed of `one` over that of the fastest of `others`, by round, and its median."""
    ratios = [
        figures[one]["tokens_per_second"]
        / max(figures[other]["tokens_per_second"] for other in others)
        for figures in rounds
        if one in figures
    ]
    return {
        "median": round(statistics.median(ratios), 3),
        "rounds": [round(value, 3) for value in ratios],
    }


def data_set(scratch: Path) -> dict[str, Any]:
    """Return the sizes of the samples."""
    manifest = Manifest.read(Storage(str(scratch / "data")))
    shorter = sum(manifest.length_histogram[: manifest.seq_len]) / manifest.samples
    return {
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "vocabulary": manifest.vocabulary.size,
        "longest_sample": manifest.seq_len,
        "mean_sample": round(manifest.tokens / manifest.samples, 1),
        "share_of_samples_below_the_longest": round(shorter, 3),
    }


def main() -> None:
    parser = parser_of(__doc__, rounds=ROUNDS, wikitext=True)
    parser.add_argument("--python", type=Path, required=True, help="a Python with the rivals")
    parser.add_argument("--composer", type=Path, required=True, help="a Python with Composer")
    parser.add_argument(
        "--documents", choices=RESULT, default="whole", help="what a sample is cut from"
    )
    parser.add_argument("--scratch", type=Path, help="folder for data and rounds, kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with scratch_folder(arguments.scratch) as folder:
        scratch = folder / arguments.documents
        scratch.mkdir(exist_ok=True)
        prepare_all(arguments.wikitext, scratch, arguments.documents)
        rounds = measure(Bench(scratch, arguments.python, arguments.composer), arguments.rounds)
        data = data_set(scratch)
    figures = {
        "model": "BERT-mini",
        "documents": arguments.documents,
        "data": data,
        "samples_per_step": BATCH_SIZE,
        "one_worker_over_the_default": ratio(ONE, [DEFAULT], rounds),
        "one_worker_over_the_best_rival": ratio(ONE, list(RIVALS), rounds),
        "two_workers_over_one": {trainer: ratio(trainer, [ONE], rounds) for trainer in TWO},
        "rows": [row(trainer, rounds) for trainer in (*RIVALS, *OURS)],
        "rival_versions": versions_in(arguments.python, PACKAGES),
        "composer_versions": versions_in(arguments.composer, COMPOSER_PACKAGES),
    }
    write_result(RESULT[arguments.documents], figures, ("elastrata", "ray", "torch"))


if __name__ == "__main__":
    main()
