"""BERT-mini on WikiText: accuracy, loss curve and speed.

    python benchmarks/wikitext.py ../shared/data/wikitext

Prepares the text, trains `bert/wikitext-mini` with two workers through the command line, and
compares the accuracy on masked validation tokens with that of always predicting the most frequent
token. Writes `results/wikitext.json` with the loss curve, and the curve as a picture.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from typing import Any

import numpy as np
from harness import RESULTS, elastrata, parser_of, wikitext_source, write_result

from elastrata.recipe.file import load_recipe
from elastrata.run import history
from elastrata.run.pictures import FOLDER, LOSS_CURVE
from elastrata.step.evaluate import EVALUATION_SEED, evaluation_step
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.storage import Storage

RECIPE, CURVE_POINTS = "bert/wikitext-mini", 100


def most_frequent_accuracy(overrides: list[str]) -> float:
    """Return the accuracy of predicting the most frequent masked token."""
    recipe = load_recipe(RECIPE, overrides)
    (held_out,) = find_training_data(recipe).held_out
    assert held_out is not None
    rows = evaluation_step(
        held_out, samples=recipe.evaluation.samples, rank=0, num_ranks=1
    ).micro_batches
    vocabulary = held_out.manifest.vocabulary
    labels: list[np.ndarray] = []
    for part in rows:
        batch: Any = recipe.workload.collate(part, vocabulary, EVALUATION_SEED)
        # The same masks as in the evaluation.
        labels.append(batch.targets.numpy())
    counts = np.bincount(np.concatenate(labels))
    return float(counts.max() / counts.sum())


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()

    def source(part: str) -> str:
        return json.dumps([wikitext_source(arguments.wikitext, part)])

    with tempfile.TemporaryDirectory() as scratch:
        overrides = [
            f"data.path={scratch}/data",
            f"data.prepare.sources={source('train')}",
            f"data.prepare.held_out={source('validation')}",
            f"storage={scratch}/runs",
            *arguments.overrides,
        ]
        prepared = elastrata("prepare", RECIPE, *overrides)
        started = time.perf_counter()
        trained = elastrata("train", RECIPE, *overrides)
        seconds = time.perf_counter() - started
        run = Storage(trained["run_dir"])
        shutil.copy(run.path(FOLDER, LOSS_CURVE), RESULTS / "wikitext-loss.png")
        write_result(
            "wikitext",
            {
                "data": {key: prepared[key] for key in ("samples", "tokens", "vocabulary")},
                "seconds": round(seconds, 1),
                **{
                    key: trained[key]
                    for key in ("steps", "samples_seen", "tokens_seen", "world_sizes")
                },
                "final_training_loss": trained["final_loss"],
                "most_frequent_token_accuracy": most_frequent_accuracy(overrides),
                **curves(run),
            },
            ("elastrata", "ray", "torch"),
        )


def curves(run: Storage) -> dict[str, Any]:
    """Return validation figures, and the training loss as means over equal spans of steps."""
    entries = history.read_entries(run.sub("history"))
    steps = history.effective_steps(entries)
    evaluations = [
        {"step": entry["step"], "loss": entry["eval/loss"], "accuracy": entry["eval/mlm_accuracy"]}
        for entry in entries
        if entry["kind"] == "evaluated"
    ]
    spans = np.array_split(np.arange(len(steps)), CURVE_POINTS)
    return {
        "validation_accuracy": evaluations[-1]["accuracy"],
        "validation_loss": evaluations[-1]["loss"],
        "validation": evaluations,
        "training_loss": [
            {
                "step": steps[span[-1]]["step"],
                "tokens": steps[span[-1]]["tokens"],
                "loss": round(float(np.mean([steps[i]["loss"] for i in span])), 4),
            }
            for span in spans
        ],
    }


if __name__ == "__main__":
    main()
