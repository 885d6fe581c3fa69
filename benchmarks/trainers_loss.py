"""Validation loss by tokens: Elastrata's order and deal compared with random batches.

    python benchmarks/trainers_loss.py ../shared/data/wikitext

Trains BERT-tiny on the paragraphs of WikiText and of this Python's standard library, up to 128
tokens. Every seed trains twice: with the batches of `elastrata train`, dealt to two ranks, and with
batches cut from a permutation of all samples by `torch.randperm`. All else is the same: initial
weights, masks of a sample, the engine's step, AdamW, schedule, clipping, evaluation. A run is one
process with one thread, without Ray; two run at the same time. The batches of both are also
compared: their number of tokens, and the number of rare words that two samples of a batch share,
which would be high if they came from one document.

Writes `results/trainers-loss.json` and `.png`; `--parts batches` keeps the existing losses.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from harness import (
    RESULTS,
    VOCABULARY,
    known_result,
    parser_of,
    picture,
    prepare,
    scratch_folder,
    sources,
    write_result,
)

from elastrata.optim.optimizer import build_optimizer, set_learning_rate
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.step.clip import build_clip
from elastrata.step.evaluate import evaluate, evaluation_step
from elastrata.step.forward_backward import WholeModel
from elastrata.step.train_step import train_step
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.payload import StepLayout, decode, encode
from elastrata_pipelines.rows import Rows

SEEDS, STEPS, EVERY, BATCH_SIZE, RANKS, POINTS = 4, 600, 50, 32, 2, 6
DEALT, DRAWN = "Elastrata's order and deal", "batches drawn at random"
PARTS = ("losses", "batches")
# The tokenizer numbers its tokens roughly by frequency.
RARE = 800
"""First id of a rare token."""
RESULT = "trainers-loss"
Curve = list[tuple[int, float]]
"""Pairs of tokens seen and validation loss."""
Curves = dict[str, list[Curve]]
"""A curve per seed, by name."""


def dealt_steps(batches: Batches, recipe: Recipe) -> Iterator[list[Rows]]:
    """Yield the micro-batches of all ranks for every step, as in a training run."""
    dtype = batches.manifest.token_dtype
    for group in batches.groups(
        Start(), steps=recipe.steps, batch_size=recipe.batch_size, max_tokens=2**20
    ):
        payloads = batches.payloads(group, RANKS)
        for parts in zip(*(decode(payload, dtype) for payload in payloads), strict=True):
            yield [rows for part in parts for rows in part.micro_batches]


def drawn_steps(batches: Batches, recipe: Recipe) -> Iterator[list[Rows]]:
    """Yield the micro-batches of steps cut from one permutation of all samples."""
    manifest, size = batches.manifest, recipe.batch_size
    samples = pa.concat_tables(batches.stripes().read(range(manifest.stripes))).combine_chunks()
    lengths = samples["length"].to_numpy()
    generator = torch.Generator().manual_seed(recipe.seed)
    order = torch.randperm(manifest.samples, generator=generator).numpy()
    for step in range(recipe.steps):
        chosen_rows = order[step * size : (step + 1) * size]
        # Rows are sorted by length within their batch for speed; the loss is a sum over them.
        chosen_rows = chosen_rows[np.argsort(-lengths[chosen_rows], kind="stable")]
        layout = StepLayout(step=step + 1, cuts=[0, size], imbalance=1.0)
        # Through the payload format, so that the rows have the same form as dealt ones.
        payload = encode(samples.take(chosen_rows), np.zeros(size, np.int64), [layout])
        (part,) = decode(payload, manifest.token_dtype)
        yield part.micro_batches


STEPS_OF = {DEALT: dealt_steps, DRAWN: drawn_steps}


def train(name: str, recipe: Recipe) -> Curve:
    """Train one run in this process."""
    torch.set_num_threads(1)
    data = find_training_data(recipe)
    (validation,) = data.held_out
    assert validation is not None
    vocabulary, workload, device = data.train.manifest.vocabulary, recipe.workload, "cpu"
    torch.manual_seed(recipe.seed)
    model = workload.build_model(vocabulary, data.train.manifest.seq_len)
    optimizer = build_optimizer(recipe.optimizer, model, workload.blocks(model))
    clip, forward_backward = build_clip(recipe.clip, model), WholeModel(model, workload)
    held_out = evaluation_step(
        validation, samples=recipe.evaluation.samples, rank=0, num_ranks=1
    ).micro_batches
    tokens, curve = 0, []
    for number, micro_batches in enumerate(STEPS_OF[name](data.train, recipe)):
        collated = [workload.collate(rows, vocabulary, recipe.seed) for rows in micro_batches]
        set_learning_rate(optimizer, recipe.learning_rate(number))
        weights = {"mlm": sum(batch.weights["mlm"] for batch in collated)}
        train_step(forward_backward, optimizer, collated, weights=weights, clip=clip)
        tokens += sum(len(rows.tokens) for rows in micro_batches)
        if (number + 1) % recipe.evaluation.every == 0:
            loss = evaluate(forward_backward, workload, held_out, vocabulary, torch.device(device))
            # Over tokens, as random batches have other numbers of tokens than dealt ones.
            curve.append((tokens, loss.total))
    return curve


def batch_figures(name: str, recipe: Recipe) -> dict[str, float]:
    """Return the tokens of a run's batches, and the rare words that two of their samples share."""
    tokens, shared = [], []
    for micro_batches in STEPS_OF[name](find_training_data(recipe).train, recipe):
        tokens.append(sum(len(rows.tokens) for rows in micro_batches))
        samples = [
            set(sample[sample >= RARE].tolist())
            for rows in micro_batches
            for sample in np.split(rows.tokens, np.cumsum(rows.lengths)[:-1])
        ]
        counts = Counter(word for sample in samples for word in sample).values()
        # Ordered pairs, as in the sum below.
        pairs = len(samples) * (len(samples) - 1)
        shared.append(sum(count * (count - 1) for count in counts) / pairs)
    return {
        "tokens": round(statistics.fmean(tokens), 1),
        "standard_deviation_of_tokens": round(statistics.stdev(tokens), 1),
        "rare_words_that_two_samples_share": round(statistics.fmean(shared), 4),
        "its_standard_error": round(statistics.stdev(shared) / len(shared) ** 0.5, 4),
    }


def write_recipe(wikitext: Path, scratch: Path) -> Path:
    """Write the recipe, and prepare its data set if it is missing."""
    values = {
        "extends": "bert/tiny",
        "data": {
            "path": str(scratch / "paragraphs"),
            "prepare": {
                "sources": sources(wikitext, scratch / "python", "paragraph"),
                "tokenizer": {"vocab_size": VOCABULARY},
                "seq_len": 128,
                "held_out": 0.03,
            },
        },
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "optimizer": {"lr": 3e-3, "betas": [0.9, 0.98]},
        "schedule": {"warmup_steps": 60},
        "evaluation": {"every": EVERY, "samples": 1024},
    }
    prepare(scratch / "loss.yaml", values)
    return scratch / "loss.yaml"


def run_all(recipe: Path, seeds: int) -> Curves:
    """Train all runs, two at a time."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        running = {
            name: [
                pool.submit(train, name, load_recipe(str(recipe), [f"seed={seed}"]))
                for seed in range(seeds)
            ]
            for name in STEPS_OF
        }
        return {name: [run.result() for run in runs] for name, runs in running.items()}


def losses_at(curves: Sequence[Curve], tokens: Sequence[int]) -> np.ndarray:
    """Return losses interpolated at equal numbers of tokens, shape [seeds, len(tokens)]."""
    return np.array([np.interp(tokens, *zip(*curve, strict=True)) for curve in curves])


def comparison(curves: Curves) -> list[dict[str, Any]]:
    """Compare both at equal numbers of tokens, up to the last that all runs have seen."""
    ends = [curve[-1][0] for runs in curves.values() for curve in runs]
    starts = [curve[0][0] for runs in curves.values() for curve in runs]
    tokens = np.linspace(max(starts), min(ends), POINTS).astype(int).tolist()
    dealt_losses, drawn_losses = (losses_at(curves[name], tokens) for name in (DEALT, DRAWN))
    return [
        {
            "tokens": count,
            **{
                name: {
                    "mean": round(float(seed_losses.mean()), 4),
                    "seeds": [round(loss, 4) for loss in seed_losses.tolist()],
                    "standard_deviation": round(statistics.stdev(seed_losses.tolist()), 4),
                }
                for name, seed_losses in (
                    (DEALT, dealt_losses[:, place]),
                    (DRAWN, drawn_losses[:, place]),
                )
            },
            "difference_of_means": round(
                float(dealt_losses[:, place].mean() - drawn_losses[:, place].mean()), 4
            ),
            "spread_of_the_random_seeds": round(float(np.ptp(drawn_losses[:, place])), 4),
        }
        for place, count in enumerate(tokens)
    ]


def draw(curves: Curves, path: Path) -> None:
    """Draw a line for every seed, and a band around the seeds of each kind."""
    figure = picture(8, 5)
    axes = figure.subplots()
    for name, runs in curves.items():
        tokens = [count for count, _ in runs[0]]
        losses = losses_at(runs, tokens)
        (line,) = axes.plot(tokens, losses.mean(axis=0), label=f"{name}: mean of {len(runs)} seeds")
        axes.plot(tokens, losses.T, color=line.get_color(), linewidth=0.6, alpha=0.6)
        axes.fill_between(
            tokens, losses.min(axis=0), losses.max(axis=0), color=line.get_color(), alpha=0.2
        )
    axes.set_xlabel("tokens seen")
    axes.set_ylabel("validation loss (nats)")
    axes.legend(frameon=False)
    figure.savefig(path)


def loss_figures(curves: Curves) -> dict[str, Any]:
    """Return the figures of both curves, and draw them."""
    compared = comparison(curves)
    draw(curves, RESULTS / f"{RESULT}.png")
    return {
        "within_the_spread_of_seeds": all(
            abs(point["difference_of_means"]) <= point["spread_of_the_random_seeds"]
            for point in compared
        ),
        "at_equal_tokens": compared,
        "curves": curves,
    }


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--scratch", type=Path, help="folder for the data, kept")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="to measure")
    arguments = parser.parse_args()
    figures = known_result(RESULT) | {"steps": STEPS, "samples_per_step": BATCH_SIZE}
    with scratch_folder(arguments.scratch) as scratch:
        recipe = write_recipe(arguments.wikitext, scratch)
        if "losses" in arguments.parts:
            figures |= loss_figures(run_all(recipe, arguments.seeds))
        if "batches" in arguments.parts:
            figures["batches"] = {
                name: [
                    batch_figures(name, load_recipe(str(recipe), [f"seed={seed}"]))
                    for seed in range(arguments.seeds)
                ]
                for name in STEPS_OF
            }
    write_result(RESULT, figures, ("elastrata", "torch"))


if __name__ == "__main__":
    main()
