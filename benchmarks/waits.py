"""Seconds that ranks wait for one another, by the scheme that shares a batch between them.

    python benchmarks/waits.py ../shared/data/wikitext

Gloo ranks train BERT-mini on paragraphs of WikiText and definitions of Python's library, 16 samples
per rank. Every global batch is shared by each scheme in turn. A rank runs forward and backward over
its micro-batches without communication, then meets the others at a barrier and sums gradients with
them. One update follows the last scheme, so that all schemes see the same batches and weights. All
ranks sort their rows by length. `the same rows` gives every rank the rows of rank 0 under the deal:
the remaining waiting time is due to the machine.

- by CPU time: a rank waits for the slowest one's additional CPU time of its thread. This is valid
  even if ranks share cores.
- by the clock: the time that ranks spend at the barrier, if each has a core.
- predicted: work by the deal's cost model, the largest of all ranks over the mean.

`forms` counts the computation per token of text with padded rows, from the lengths alone. Writes
benchmarks/results/waits.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from harness import NATURAL_LENGTH, on_ranks, parser_of, prepare_natural_lengths, write_result

from elastrata.optim.optimizer import build_optimizer
from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import find_training_data
from elastrata.workload.workload import Workload
from elastrata_pipelines import baselines
from elastrata_pipelines.balance import batches_of_order
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.deal import Hand, Ints, deal, split_into_micro_batches
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.hashing import mix
from elastrata_pipelines.payload import decode
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.storage import Storage

Floats = npt.NDArray[np.float64]

SIZES, SAMPLES_EACH, WARM_UP = (2, 4), 16, 2
DEAL, STRATIFIED, RANDOM, CONTROL = "dealt by work", "stratified", "random", "the same rows"
SCHEMES = (DEAL, STRATIFIED, RANDOM)
COUNTED = ("bert/mini", "bert/base")
"""Models whose FLOPs are counted."""


@dataclass(frozen=True)
class Taken:
    """Time of one rank for its share of one batch."""

    work: int
    cpu_seconds: float
    """CPU time of forward and backward."""
    seconds: float
    seconds_at_barrier: float


def recipe_of(data: str, batch_size: int, steps: int) -> Recipe:
    overrides = [
        f"data.path={data}",
        f"batch_size={batch_size}",
        f"steps={steps}",
        "optimizer.lr=1e-3",
        "schedule.warmup_steps=0",
    ]
    return load_recipe("bert/mini", overrides)


def whole_batches(batches: Batches, recipe: Recipe) -> Iterator[Rows]:
    """Yield the rows of every global batch, in random order."""
    groups = batches.groups(
        Start(), steps=recipe.steps, batch_size=recipe.batch_size, max_tokens=2**16
    )
    for group in groups:
        (payload,) = batches.payloads(group, 1)
        for step in decode(payload, batches.manifest.token_dtype):
            # A payload's rows are in the order of the deal; the other schemes expect random order.
            yield taken(step.rows, np.argsort(mix(step.rows.sample_ids.astype(np.int64))))


def taken(rows: Rows, which: Ints) -> Rows:
    """Return the selected rows in the given order."""
    ends = np.cumsum(rows.lengths)
    starts = ends - rows.lengths
    tokens = [rows.tokens[starts[row] : ends[row]] for row in which]
    return Rows(
        sample_ids=rows.sample_ids[which],
        epochs=rows.epochs[which],
        lengths=rows.lengths[which],
        tokens=np.concatenate([rows.tokens[:0], *tokens]),
    )


def hands_of(batches: Batches, lengths: Ints, ranks: int) -> dict[str, Sequence[Hand]]:
    """Return the share of every rank by scheme, with the longest rows first."""
    budget = batches.tokens_per_micro_batch
    dealt_shares = deal(
        lengths, num_ranks=ranks, work=batches.work, tokens_per_micro_batch=budget
    ).hands

    def cut_shares(shares: Sequence[Ints]) -> Sequence[Hand]:
        # Longest first, as the deal sorts rows, so that schemes differ only in the distribution.
        by_length = [rows[np.argsort(-lengths[rows], kind="stable")] for rows in shares]
        return split_into_micro_batches(by_length, lengths, [budget] * len(by_length))

    return {
        DEAL: dealt_shares,
        STRATIFIED: cut_shares(baselines.assign_stratified(lengths, ranks)),
        RANDOM: cut_shares(baselines.assign_consecutive(lengths, ranks)),
        # Equal work on every rank.
        CONTROL: [dealt_shares[0]] * ranks,
    }


class Trainer:
    """A whole copy of the model on one rank."""

    def __init__(self, recipe: Recipe, vocabulary: Vocabulary) -> None:
        torch.manual_seed(recipe.seed)
        self._workload: Workload = recipe.workload
        self._vocabulary, self._seed = vocabulary, recipe.seed
        self._model = recipe.workload.build_model(vocabulary, NATURAL_LENGTH)
        blocks = recipe.workload.blocks(self._model)
        self._optimizer = build_optimizer(recipe.optimizer, self._model, blocks)
        self._parameters = list(self._model.parameters())

    def share(self, rows: Rows, hand: Hand, work: int) -> Taken:
        """Compute the gradient of a share, then of the whole batch; measured until all ranks have
        met."""
        parts = taken(rows, hand.rows).split(hand.cuts)
        batches = [self._workload.collate(part, self._vocabulary, self._seed) for part in parts]
        weight = torch.tensor(float(sum(batch.weights["mlm"] for batch in batches)))
        # Loss weights count the predictions of all ranks.
        dist.all_reduce(weight)
        self._optimizer.zero_grad()
        dist.barrier()
        start_time, cpu_start_time = time.perf_counter(), time.process_time()
        for batch in batches:
            (self._workload.loss(self._model, batch).terms["mlm"] / weight).backward()
        cpu_seconds, seconds = (
            time.process_time() - cpu_start_time,
            time.perf_counter() - start_time,
        )
        dist.barrier()
        waited = time.perf_counter() - start_time - seconds
        # Not measured: all schemes sum the same gradients.
        for parameter in self._parameters:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        return Taken(work, cpu_seconds, seconds, waited)

    def update(self) -> None:
        """Apply the gradient of the last share."""
        self._optimizer.step()


def on_rank(rank: int, ranks: int, data: str, steps: int) -> dict[str, list[Taken]]:
    recipe = recipe_of(data, SAMPLES_EACH * ranks, steps + WARM_UP)
    batches = find_training_data(recipe).train
    trainer = Trainer(recipe, batches.manifest.vocabulary)
    shares: dict[str, list[Taken]] = {}
    for number, rows in enumerate(whole_batches(batches, recipe)):
        shares_by_scheme = hands_of(batches, rows.lengths, ranks)
        # Schemes take turns in going first.
        turn = number % len(SCHEMES)
        # The control comes first: the update needs a gradient of the batch.
        for name in (CONTROL, *SCHEMES[turn:], *SCHEMES[:turn]):
            hand = shares_by_scheme[name][rank]
            work = int(batches.work(rows.lengths[hand.rows]).sum())
            share = trainer.share(rows, hand, work)
            if number >= WARM_UP:
                shares.setdefault(name, []).append(share)
        trainer.update()
    return shares


def measure(ranks: int, data: str, steps: int) -> dict[str, Any]:
    results_by_rank = on_ranks(ranks, on_rank, ranks, data, steps)
    by_scheme = {name: [rank[name] for rank in results_by_rank] for name in (*SCHEMES, CONTROL)}
    return {
        "ranks": ranks,
        "samples_in_a_batch": SAMPLES_EACH * ranks,
        "schemes": {name: waits(shares, ranks) for name, shares in by_scheme.items()},
        "estimate": estimate([by_scheme[name] for name in SCHEMES]),
    }


def table(shares: Sequence[Sequence[Taken]], value: Callable[[Taken], float]) -> Floats:
    """Return the values as an array of shape [ranks, steps]."""
    return np.array([[value(share) for share in rank] for rank in shares])


def waits(shares: Sequence[Sequence[Taken]], ranks: int) -> dict[str, Any]:
    """Return the figures of the ranks' waiting under one scheme."""
    work, cpu = table(shares, lambda s: s.work), table(shares, lambda s: s.cpu_seconds)
    figures: dict[str, Any] = {
        "predicted_max_over_mean": rounded(imbalance(work)),
        "measured_max_over_mean": rounded(imbalance(cpu)),
        "by_cpu_time": waiting(cpu.max(axis=0) - cpu, cpu.max(axis=0)),
    }
    # Wall-clock times are meaningless if ranks share cores.
    if ranks <= (os.cpu_count() or 1):
        at_barrier = table(shares, lambda s: s.seconds_at_barrier)
        whole_seconds = table(shares, lambda s: s.seconds) + at_barrier
        figures["by_the_clock"] = waiting(at_barrier, whole_seconds.max(axis=0))
    return figures


def waiting(waited: Floats, step: Floats) -> dict[str, float]:
    """Return means over the steps.

    Args:
        waited: seconds, shape [ranks, steps].
        step: seconds of forward and backward of the slowest rank, shape [steps].
    """
    return {
        "seconds_waiting_per_rank_and_step": rounded(waited.mean()),
        "seconds_of_forward_and_backward": rounded(step.mean()),
        "share_waiting": rounded(waited.mean() / step.mean()),
        "share_waiting_in_the_worst_step": rounded((waited.mean(axis=0) / step).max()),
    }


def imbalance(values: Floats) -> float:
    """Return the largest value of all ranks over their mean, averaged over the steps."""
    return float((values.max(axis=0) / values.mean(axis=0)).mean())


def estimate(by_scheme: Sequence[Sequence[Sequence[Taken]]]) -> dict[str, Any]:
    """Return how well a rank's work predicts its CPU seconds, over all schemes, steps and ranks."""
    parts = [(table(s, lambda t: t.work), table(s, lambda t: t.cpu_seconds)) for s in by_scheme]
    predicted_shares = np.concatenate([(work / work.mean(axis=0)).ravel() for work, _ in parts])
    measured_shares = np.concatenate([(cpu / cpu.mean(axis=0)).ravel() for _, cpu in parts])
    errors = np.abs(predicted_shares / measured_shares - 1)
    return {
        "of": "a rank's share of the work, beside its share of the CPU seconds",
        "correlation": rounded(np.corrcoef(predicted_shares, measured_shares)[0, 1]),
        "slope": rounded(np.polyfit(predicted_shares, measured_shares, 1)[0]),
        "median_relative_error": rounded(np.median(errors)),
        "largest_relative_error": rounded(errors.max()),
    }


def forms(data: str, ranks: int) -> dict[str, Any]:
    """Return padding and FLOPs per token of text over one epoch of batches."""
    recipe = recipe_of(data, SAMPLES_EACH * ranks, 1)
    batches = find_training_data(recipe).train
    stored = batches.manifest.read_lengths(Storage(data))
    steps = len(stored) // recipe.batch_size
    lengths_by_form: dict[str, list[Ints]] = {}
    for unsorted in batches_of_order(
        stored, batches.order, batch_size=recipe.batch_size, steps=steps
    ):
        shares_by_scheme = hands_of(batches, unsorted, ranks)
        lengths_by_form.setdefault("without padding", []).append(unsorted)
        for name, scheme in (("dealt by work", DEAL), ("dealt at random", RANDOM)):
            padded = [
                np.full(stop - start, unsorted[hand.rows[start:stop]].max())
                for hand in shares_by_scheme[scheme]
                for start, stop in zip(hand.cuts[:-1], hand.cuts[1:], strict=True)
                if stop > start
            ]
            key = f"padded to the longest of a micro-batch, {name}"
            lengths_by_form.setdefault(key, []).extend(padded)
        lengths_by_form.setdefault(f"padded to {NATURAL_LENGTH}", []).append(
            np.full_like(unsorted, NATURAL_LENGTH)
        )
    text = int(np.concatenate(lengths_by_form["without padding"]).sum())
    return {
        name: counted(np.concatenate(lengths), text, batches.manifest.vocabulary)
        for name, lengths in lengths_by_form.items()
    }


def counted(lengths: Ints, text: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the cost of rows computed at these lengths, per token of `text` tokens."""
    flops = {}
    for name in COUNTED:
        workload: Any = load_recipe(name).workload
        weights = {"mlm": workload.mask_probability * text}
        flops[name] = round(workload.flops(lengths.tolist(), weights, vocabulary) / text / 1e6, 2)
    return {
        "padding_fraction": rounded(1 - text / lengths.sum()),
        "mflops_per_token_of_text": flops,
    }


def rounded(value: float) -> float:
    return round(float(value), 4)


def main() -> None:
    parser = parser_of(__doc__, wikitext=True)
    parser.add_argument("--steps", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data = prepare_natural_lengths(arguments.wikitext, Path(scratch) / "data")
        manifest = find_training_data(recipe_of(data, SAMPLES_EACH, 1)).train.manifest
        figures = {
            "corpus": {
                "samples": manifest.samples,
                "mean_length": round(manifest.tokens / manifest.samples, 1),
                f"share_of_length_{NATURAL_LENGTH}": rounded(
                    manifest.length_histogram[NATURAL_LENGTH] / manifest.samples
                ),
            },
            "steps": arguments.steps,
            "waits": [measure(ranks, data, arguments.steps) for ranks in SIZES],
            "forms": forms(data, max(SIZES)),
        }
    write_result("waits", figures, ("elastrata", "torch", "numpy"))


if __name__ == "__main__":
    main()
