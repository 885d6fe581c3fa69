"""The samples of a measured step: of the recipe's data set, or random ones of chosen lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elastrata.bench.input import rank_steps
from elastrata.bench.lengths import DATA, check_fits, choose_lengths
from elastrata.recipe.data_spec import data_spec
from elastrata.recipe.layout_rules import fixed_tokens
from elastrata.recipe.recipe import Recipe
from elastrata.trainer.preflight import training_data
from elastrata_pipelines.balance import drawn_batches
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.format import Vocabulary
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.virtual_ranks import deal_to_virtual

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

    Args:
        recipe: a data set that is not prepared is needed for `data` only.
        wanted: `data`, `full` or a JSON file, see `choose_lengths`.
        steps: how many.

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
                rows=self._rows(lengths[hand.rows], done * self.batch_size, rng),
                cuts=hand.cuts,
                imbalance=dealt.imbalance,
                rounds=dealt.rounds,
            )

    def _rows(self, lengths: Ints, first: int, rng: np.random.Generator) -> Rows:
        """Samples of these lengths, with ids from `first` on."""
        dtype = np.uint16 if self.num_ids <= _LARGEST_UINT16 else np.uint32
        return Rows(
            sample_ids=np.arange(first, first + len(lengths), dtype=np.uint64),
            epochs=np.zeros(len(lengths), dtype=np.int64),
            lengths=lengths,
            tokens=rng.integers(self.num_ids, size=int(lengths.sum()), dtype=dtype),
            second_starts=lengths // 2 if self.pairs else None,
            is_next=rng.random(len(lengths)) < 0.5 if self.pairs else None,
        )
