"""Samples of a measured step: from the data set, or random ones with chosen lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastrata.recipe.data_sets import DataSpec, data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import require_fixed_tokens
from elastrata.trainer.preflight import find_training_data
from elastrata_pipelines.balance import draw_batches
from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.errors import UserError, suggest_nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.virtual_ranks import deal_to_virtual

DATA, FULL = "data", "full"
_FIRST_LENGTHS = {"counts": 1, "length_histogram": 0}
"""By key of a JSON file with a histogram, the length that the first entry counts."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Distribution of sample lengths."""

    name: str
    """`data`, `full`, or the name of the file."""
    histogram: tuple[int, ...] | None
    """`histogram[s]` is the number of samples of s tokens, up to the longest. Lengths are sampled
    from it. None: samples and their order are those of the data set."""


def choose_lengths(wanted: str | None, *, seq_len: int, prepared: bool) -> Lengths:
    """Return the lengths that `--lengths` names.

    Raises:
        UserError: the file does not exist or contains no histogram.
    """
    name = wanted or (DATA if prepared else FULL)
    if name == DATA:
        return Lengths(name=DATA, histogram=None)
    if name == FULL:
        return Lengths(name=FULL, histogram=(*[0] * seq_len, 1))
    return Lengths(name=Path(name).name, histogram=read_histogram(name))


def read_histogram(path: str) -> tuple[int, ...]:
    """Return the histogram of a JSON file: entry s is the number of samples of s tokens.

    Raises:
        UserError: the file does not exist, or does not have the form `{"counts": [...]}` (first
            entry for length 1) or `{"length_histogram": [...]}` (first entry for length 0, as in a
            data set's manifest).
    """
    where = f"--lengths: {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        hint = suggest_nearest(path, (DATA, FULL))
        raise UserError(
            f"{where}: expected data, full or a JSON file{hint} ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    key = next(
        (key for key in _FIRST_LENGTHS if isinstance(content, dict) and key in content), None
    )
    if key is None:
        raise UserError(
            f"{where}: expected an object with a list 'counts' (samples of 1, 2, 3... tokens) or "
            "'length_histogram' (of 0, 1, 2...)"
        )
    return _validate_histogram(content[key], f"{where}: {key}", first_length=_FIRST_LENGTHS[key])


def _validate_histogram(counts: Any, where: str, *, first_length: int) -> tuple[int, ...]:
    """Return the histogram that starts at length 0, without trailing zeros."""
    if not isinstance(counts, list):
        raise UserError(f"{where}: expected a list of numbers of samples")
    # Indices of the result are lengths, so a list that begins with length 1 is shifted.
    histogram = [0] * first_length + counts
    for length, count in enumerate(histogram):
        # In Python a bool is an int.
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UserError(
                f"{where}: {json.dumps(count)} samples of length {length}: expected whole numbers "
                "of at least 0"
            )
    longest = max((length for length, count in enumerate(histogram) if count), default=0)
    # A sample without tokens cannot be trained on.
    if not longest or histogram[0]:
        raise UserError(f"{where}: expected at least one sample, and none of length 0")
    return tuple(histogram[: longest + 1])


def check_fits(recipe: Recipe, spec: DataSpec, name: str, histogram: tuple[int, ...]) -> None:
    """Check that the recipe's model and micro-batches accept samples of these lengths.

    Raises:
        UserError: they do not; one line for each reason.
    """
    longest = len(histogram) - 1
    problems = recipe.workload.problems(_build_manifest(spec, histogram))
    most = recipe.micro_batch_tokens
    if most != "auto" and longest > most:
        problems.append(
            f"micro_batch_tokens: {most}: --lengths {name} has samples of "
            f"{longest} tokens; expected at least that"
        )
    if problems:
        raise UserError(*problems)


def _build_manifest(spec: DataSpec, histogram: tuple[int, ...]) -> Manifest:
    """Return a manifest with the fields that workloads check."""
    return Manifest(
        samples=sum(histogram),
        tokens=sum(length * count for length, count in enumerate(histogram)),
        stripes=0,
        stripe_size=1,
        seq_len=len(histogram) - 1,
        seed=0,
        packing="none",
        pairs=spec.pairs,
        token_dtype="uint32",
        length_histogram=histogram,
        vocabulary=spec.vocabulary,
        tokenizer_fingerprint="",
        sources=(),
        files=(),
    )


_LARGEST_UINT16 = 2**16
"""Number of ids that 16 bits can represent."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All training data of a single rank, in memory."""

    lengths: str
    """`data`, `full`, or the name of a histogram file. Tokens are random except with `data`."""
    vocabulary: Vocabulary
    seq_len: int
    """Largest number of tokens of a sample."""
    # Everything is loaded before the measurement, which therefore contains no reading.
    steps: tuple[RankStep, ...]


def bench_samples(recipe: Recipe, wanted: str | None, *, steps: int) -> Samples:
    """Return the first steps of a single rank with the recipe's full batch size.

    Raises:
        UserError: the lengths, the data set and the recipe do not match; one line for each reason.
    """
    tokens = require_fixed_tokens(recipe, "a measurement")
    spec = data_spec(recipe)
    lengths = choose_lengths(wanted, seq_len=spec.seq_len, prepared=spec.prepared)
    if lengths.histogram is None:
        return _load_samples(recipe, steps)
    check_fits(recipe, spec, lengths.name, lengths.histogram)
    random = RandomSteps(
        histogram=lengths.histogram,
        num_ids=spec.vocabulary.size,
        pairs=spec.pairs,
        steps=steps,
        batch_size=recipe.batch_size,
        work=recipe.workload.work(spec.vocabulary),
        tokens_per_micro_batch=tokens,
        virtual_ranks=recipe.parallel.virtual_ranks or 1,
        seed=recipe.seed,
    )
    return Samples(
        lengths=lengths.name,
        vocabulary=spec.vocabulary,
        seq_len=len(lengths.histogram) - 1,
        steps=tuple(random),
    )


def _load_samples(recipe: Recipe, steps: int) -> Samples:
    batches = find_training_data(recipe).train
    return Samples(
        lengths=DATA,
        vocabulary=batches.manifest.vocabulary,
        seq_len=batches.manifest.seq_len,
        steps=tuple(rank_steps(batches, batch_size=recipe.batch_size, steps=steps)),
    )


def rank_steps(batches: Batches, *, batch_size: int, steps: int) -> Iterator[RankStep]:
    """Yield the first steps of a run on one worker.

    Raises:
        UserError: a shard is missing or damaged.
    """
    groups = batches.groups(
        Start(), steps=steps, batch_size=batch_size, max_tokens=MAX_GROUP_TOKENS
    )
    stripes = batches.stripes()
    for group in groups:
        for payload in batches.payloads(group, 1, stripes):
            yield from decode(payload, batches.manifest.token_dtype)


@dataclass(frozen=True, kw_only=True)
class RandomSteps:
    """Reproducible steps of a single rank with random samples."""

    histogram: tuple[int, ...]
    """`histogram[s]` is the number of samples of s tokens to sample from."""
    num_ids: int
    """Exclusive upper bound of token ids."""
    pairs: bool
    """Whether samples are pairs of sentences of equal length."""
    steps: int
    batch_size: int
    work: WorkModel
    tokens_per_micro_batch: int
    virtual_ranks: int
    """Virtual ranks that the rank computes one after the other."""
    seed: int

    def __iter__(self) -> Iterator[RankStep]:
        rng = np.random.default_rng(self.seed)
        batches = draw_batches(
            self.histogram, batch_size=self.batch_size, steps=self.steps, seed=self.seed
        )
        # Samples are dealt as in a run, so that padding and micro-batches are those of real steps.
        for steps_done, lengths in enumerate(batches):
            deal = deal_to_virtual(
                lengths,
                virtual_ranks=self.virtual_ranks,
                num_ranks=1,
                work=self.work,
                tokens_per_micro_batch=self.tokens_per_micro_batch,
            )
            (hand,) = deal.hands
            yield RankStep(
                step=steps_done + 1,
                rows=random_rows(
                    lengths[hand.rows],
                    steps_done * self.batch_size + np.arange(self.batch_size),
                    num_ids=self.num_ids,
                    pairs=self.pairs,
                    rng=rng,
                ),
                cuts=hand.cuts,
                imbalance=deal.imbalance,
                rounds=deal.rounds,
            )


def random_rows(
    lengths: Ints, ids: Ints, *, num_ids: int, pairs: bool, rng: np.random.Generator
) -> Rows:
    """Return samples of given lengths and ids with random tokens below `num_ids`."""
    dtype = np.uint16 if num_ids <= _LARGEST_UINT16 else np.uint32
    return Rows(
        sample_ids=ids.astype(np.uint64),
        epochs=np.zeros(len(lengths), dtype=np.int64),
        lengths=lengths,
        tokens=rng.integers(num_ids, size=int(lengths.sum()), dtype=dtype),
        second_starts=lengths // 2 if pairs else None,
        is_next=rng.random(len(lengths)) < 0.5 if pairs else None,
    )
