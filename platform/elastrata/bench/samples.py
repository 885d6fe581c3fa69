"""The samples of a measured step: of the data set, or random ones of chosen lengths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elastrata.recipe.data_sets import DataSpec, data_spec
from elastrata.recipe.recipe import Recipe
from elastrata.recipe.rules import fixed_tokens
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.balance import drawn_batches
from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.errors import UserError, nearest
from elastrata_pipelines.format import Manifest, Vocabulary
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.virtual_ranks import deal_to_virtual

DATA, FULL = "data", "full"
_FORMS = {"counts": 1, "length_histogram": 0}
"""Keys of a file that hold a histogram, and the length that the first entry counts."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Which lengths samples have."""

    name: str
    """`data`, `full`, or the file's name."""
    histogram: tuple[int, ...] | None
    """`histogram[s]`: number of samples of s tokens, up to the longest; they are drawn from it.
    None: samples and their order are those of the data set."""


def choose_lengths(wanted: str | None, *, seq_len: int, prepared: bool) -> Lengths:
    """The lengths that `--lengths` names.

    Raises:
        UserError: no such file, or no histogram in it.
    """
    name = wanted or (DATA if prepared else FULL)
    if name == DATA:
        return Lengths(name=DATA, histogram=None)
    if name == FULL:
        return Lengths(name=FULL, histogram=(*[0] * seq_len, 1))
    return Lengths(name=Path(name).name, histogram=read_histogram(name))


def read_histogram(path: str) -> tuple[int, ...]:
    """The histogram in a JSON file: entry s is the number of samples of s tokens.

    Raises:
        UserError: there is no such file, or it is not of the form `{"counts": [...]}`, the first
            entry for length 1, or `{"length_histogram": [...]}`, the first for length 0, as in a
            data set's manifest.
    """
    where = f"--lengths: {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        hint = nearest(path, (DATA, FULL))
        raise UserError(
            f"{where}: expected data, full or a JSON file{hint} ({error.strerror})"
        ) from None
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    key = next((key for key in _FORMS if isinstance(content, dict) and key in content), None)
    if key is None:
        raise UserError(
            f"{where}: expected an object with a list 'counts' (samples of 1, 2, 3... tokens) or "
            "'length_histogram' (of 0, 1, 2...)"
        )
    return _checked(content[key], f"{where}: {key}", first_length=_FORMS[key])


def _checked(counts: Any, where: str, *, first_length: int) -> tuple[int, ...]:
    if not isinstance(counts, list):
        raise UserError(f"{where}: expected a list of numbers of samples")
    histogram = [0] * first_length + counts
    for length, count in enumerate(histogram):
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UserError(
                f"{where}: {json.dumps(count)} samples of length {length}: expected whole numbers "
                "of at least 0"
            )
    longest = max((length for length, count in enumerate(histogram) if count), default=0)
    if not longest or histogram[0]:
        raise UserError(f"{where}: expected at least one sample, and none of length 0")
    return tuple(histogram[: longest + 1])


def check_fits(recipe: Recipe, spec: DataSpec, name: str, histogram: tuple[int, ...]) -> None:
    """Makes sure that the recipe's model and micro-batches can take such samples.

    Raises:
        UserError: one line for each reason why they cannot.
    """
    longest = len(histogram) - 1
    problems = recipe.workload.problems(_manifest(spec, histogram))
    most = recipe.micro_batch_tokens
    if most != "auto" and longest > most:
        problems.append(
            f"micro_batch_tokens: {most}: --lengths {name} has samples of "
            f"{longest} tokens; expected at least that"
        )
    if problems:
        raise UserError(*problems)


def _manifest(spec: DataSpec, histogram: tuple[int, ...]) -> Manifest:
    """The manifest of such a data set, as far as a workload looks at it."""
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


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Everything a lone rank is to train on, in memory before anything is measured."""

    lengths: str
    """`data`, `full`, or the name of a histogram's file. All but `data` have random tokens."""
    vocabulary: Vocabulary
    seq_len: int
    """No sample is longer."""
    steps: tuple[RankStep, ...]


def bench_samples(recipe: Recipe, wanted: str | None, *, steps: int) -> Samples:
    """The first steps of a lone rank, each of the recipe's full batch size.

    Raises:
        UserError: the lengths, the data set and the recipe do not fit; one line for each reason.
    """
    tokens = fixed_tokens(recipe, "a measurement")
    spec = data_spec(recipe)
    lengths = choose_lengths(wanted, seq_len=spec.seq_len, prepared=spec.prepared)
    if lengths.histogram is None:
        return _of_data_set(recipe, steps)
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


def _of_data_set(recipe: Recipe, steps: int) -> Samples:
    batches = training_data(recipe).train
    return Samples(
        lengths=DATA,
        vocabulary=batches.manifest.vocabulary,
        seq_len=batches.manifest.seq_len,
        steps=tuple(rank_steps(batches, batch_size=recipe.batch_size, steps=steps)),
    )


def rank_steps(batches: Batches, *, batch_size: int, steps: int) -> Iterator[RankStep]:
    """The first steps of a run on one worker.

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
    """A lone rank's steps, of samples of drawn lengths; the same ones every time."""

    histogram: tuple[int, ...]
    """`histogram[s]`: number of samples of s tokens to draw from."""
    num_ids: int
    """Every token is below it."""
    pairs: bool
    """Whether samples are pairs of sentences, of equal length."""
    steps: int
    batch_size: int
    work: WorkModel
    tokens_per_micro_batch: int
    virtual_ranks: int
    """Parts that the rank plays one after the other."""
    seed: int

    def __iter__(self) -> Iterator[RankStep]:
        rng = np.random.default_rng(self.seed)
        batches = drawn_batches(
            self.histogram, batch_size=self.batch_size, steps=self.steps, seed=self.seed
        )
        for done, lengths in enumerate(batches):
            dealt = deal_to_virtual(
                lengths,
                virtual_ranks=self.virtual_ranks,
                num_ranks=1,
                work=self.work,
                tokens_per_micro_batch=self.tokens_per_micro_batch,
            )
            (hand,) = dealt.hands
            yield RankStep(
                step=done + 1,
                rows=random_rows(
                    lengths[hand.rows],
                    done * self.batch_size + np.arange(self.batch_size),
                    num_ids=self.num_ids,
                    pairs=self.pairs,
                    rng=rng,
                ),
                cuts=hand.cuts,
                imbalance=dealt.imbalance,
                rounds=dealt.rounds,
            )


def random_rows(
    lengths: Ints, ids: Ints, *, num_ids: int, pairs: bool, rng: np.random.Generator
) -> Rows:
    """Return samples of these lengths and ids, with random tokens below `num_ids`."""
    dtype = np.uint16 if num_ids <= _LARGEST_UINT16 else np.uint32
    return Rows(
        sample_ids=ids.astype(np.uint64),
        epochs=np.zeros(len(lengths), dtype=np.int64),
        lengths=lengths,
        tokens=rng.integers(num_ids, size=int(lengths.sum()), dtype=dtype),
        second_starts=lengths // 2 if pairs else None,
        is_next=rng.random(len(lengths)) < 0.5 if pairs else None,
    )
