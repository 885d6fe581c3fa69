"""The loss of a GPT at equal tokens, compared with the Hugging Face Trainer.

    python benchmarks/gpt_quality.py ../shared/data/wikitext --python ../rivals/bin/python

(`benchmarks/trainers.py` shows how to set up the other Python.) The Llama of `gpt/quick` trains on
WikiText and the sources of this Python's standard library, with two workers. The Trainer gets the
same initial weights, optimizer, schedule, clipping and number of tokens. As is usual there, it
trains on the same documents, concatenated, in blocks of equal length in random order. Both are
evaluated on the whole of WikiText's validation text, one document at a time. The script also checks
that our final model has the same loss in transformers.

Writes `results/gpt-quality.json`, which includes texts that the trained model generates, and
`gpt-quality.png`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import (
    RESULTS,
    VOCABULARY,
    elastrata,
    last_line,
    parser_of,
    picture,
    prepare,
    versions_in,
    wikitext_source,
    write_result,
)

from elastrata.driver.quickstart import collect_corpus
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.step.evaluate import evaluation_step
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.storage import Storage

STEPS, EVERY, WARM_UP, MAX_SAMPLES = 300, 100, 30, 2**16
PROMPTS = ("The history of", "def __init__(self")
# fp32 sums in another order.
TOLERANCE = 1e-5
"""Relative tolerance for the loss of one model, computed here and by transformers."""
Curve = list[tuple[int, float]]
"""Pairs of tokens seen and validation loss."""


def write_recipe(wikitext: Path, scratch: Path, steps: int) -> Path:
    """Write the recipe, and prepare its data set if it is missing."""
    library = collect_corpus(scratch / "python").folder
    values = {
        "extends": "gpt/quick",
        "data": {
            "path": str(scratch / "data"),
            "prepare": {
                "sources": [
                    {**wikitext_source(wikitext, "train"), "name": "wikitext"},
                    {"name": "python", "paths": str(library), "documents": "file"},
                ],
                "tokenizer": {"vocab_size": VOCABULARY},
                "held_out": [wikitext_source(wikitext, "validation")],
            },
        },
        "storage": str(scratch / "runs"),
        "steps": steps,
        "schedule": {"warmup_steps": min(WARM_UP, steps // 3)},
        "evaluation": {"every": min(EVERY, steps), "samples": MAX_SAMPLES},
        "checkpoint": {"every": min(EVERY, steps)},
        "workers": {"min": 2, "max": 2, "threads": 1},
    }
    prepare(scratch / "recipe.yaml", values)
    return scratch / "recipe.yaml"


def hand_over(recipe: Recipe, scratch: Path) -> None:
    """Write the untrained model and the tokens for the Trainer."""
    data = find_training_data(recipe)
    (held_out,) = data.held_out
    assert held_out is not None
    manifest = data.train.manifest
    torch.manual_seed(recipe.seed)
    model = recipe.workload.build_model(manifest.vocabulary, manifest.seq_len)
    recipe.workload.export(
        model.state_dict(),
        manifest.vocabulary,
        manifest.seq_len,
        Path(recipe.data.path) / "tokenizer",
        scratch / "model",
    )
    # In stored order: the Trainer shuffles the blocks itself.
    tables = data.train.stripes().read(range(manifest.stripes))
    tokens = b"".join(sample for table in tables for sample in table["tokens"].to_pylist())
    np.save(scratch / "train.npy", np.frombuffer(tokens, manifest.token_dtype))
    rows = evaluation_step(held_out, samples=MAX_SAMPLES, rank=0, num_ranks=1).micro_batches
    np.savez(scratch / "held_out.npz", **documents(rows))


def documents(rows: Sequence[Rows]) -> dict[str, np.ndarray]:
    """Return all segments of `rows`, concatenated, and their lengths."""
    return {
        "tokens": np.concatenate([part.tokens for part in rows]),
        "lengths": np.concatenate([part.segment_lengths for part in rows]),
    }


def our_run(recipe: Path, name: str) -> tuple[Curve, str]:
    """Train with Elastrata; return the curve and the run's folder."""
    trained = elastrata("train", str(recipe), "--name", name)
    entries = history.read_entries(Storage(trained["run_dir"]).sub("history"))
    tokens = {step["step"]: step["tokens"] for step in history.effective_steps(entries)}
    evaluated = [entry for entry in entries if entry["kind"] == "evaluated"]
    curve = [(tokens[entry["step"]], entry["eval/loss"]) for entry in evaluated]
    return curve, trained["run_dir"]


def settings(recipe: Recipe, tokens: int) -> dict[str, Any]:
    """Return the recipe's values under the Trainer's names, for a run of `tokens` tokens."""
    assert recipe.data.prepare is not None
    length, optimizer = recipe.data.prepare.seq_len, recipe.optimizer
    return {
        "seq_len": length,
        "batch_size": recipe.batch_size,
        # Equal tokens, not equal steps: our samples may be shorter than the Trainer's full blocks.
        "steps": tokens // (recipe.batch_size * length),
        "every": recipe.evaluation.every,
        "warmup_steps": recipe.schedule.warmup_steps,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_norm": recipe.clip.max_norm,
        "seed": recipe.seed,
    }


def in_transformers(python: Path, *arguments: str) -> Any:
    """Return the output of `measure_gpt.py`, run with two threads to match two workers."""
    script = Path(__file__).with_name("measure_gpt.py")
    return last_line([python, script, *arguments], OMP_NUM_THREADS="2")


def continuations(run: str) -> dict[str, str]:
    """Return the trained model's continuation of each prompt, sampled from the top 40 tokens."""
    options = ("--tokens", "60", "--temperature", "0.7", "--top-k", "40")
    return {
        prompt: elastrata("generate", run, "--prompt", prompt, *options)["continuation"]["text"]
        for prompt in PROMPTS
    }


def draw(curves: Mapping[str, Curve], path: Path) -> None:
    figure = picture(8, 5)
    axes = figure.subplots()
    for name, curve in curves.items():
        tokens, losses = zip(*curve, strict=True)
        axes.plot(tokens, np.exp(losses), marker="o", label=name)
    axes.set_yscale("log")
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("perplexity of WikiText's validation text")
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--python", type=Path, required=True, help="a Python with the Trainer")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        path = write_recipe(arguments.wikitext, scratch, arguments.steps)
        recipe = load_recipe(str(path), [])
        hand_over(recipe, scratch)
        ours, run = our_run(path, "run")
        elastrata("export", run, "--out", str(scratch / "trained"))
        files = (str(scratch / "train.npy"), str(scratch / "held_out.npz"))
        exported_loss = in_transformers(
            arguments.python, "loss", str(scratch / "trained"), files[1]
        )
        if not math.isclose(exported_loss, ours[-1][1], rel_tol=TOLERANCE):
            raise RuntimeError(
                f"loss of the trained model: here {ours[-1][1]}, there {exported_loss}"
            )
        trainer_settings = json.dumps(settings(recipe, ours[-1][0]))
        theirs = in_transformers(
            arguments.python, "train", str(scratch / "model"), files[1], files[0], trainer_settings
        )
        texts = continuations(run)
        manifest = find_training_data(recipe).train.manifest
    curves = {"Elastrata, 2 workers": ours, "Hugging Face Trainer": theirs}
    draw(curves, RESULTS / "gpt-quality.png")
    figures = {
        "data": {key: getattr(manifest, key) for key in ("samples", "tokens", "seq_len")},
        "perplexity": {name: round(math.exp(curve[-1][1]), 2) for name, curve in curves.items()},
        "loss_of_the_exported_model": exported_loss,
        "curves": curves,
        "continuations": texts,
        "rival_versions": versions_in(arguments.python, ("torch", "transformers", "accelerate")),
    }
    write_result("gpt-quality", figures, ("elastrata", "ray", "torch", "transformers"))


if __name__ == "__main__":
    main()
