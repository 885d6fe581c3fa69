"""Steps of random tokens, dealt and cut into micro-batches as the input pipeline does it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from elastrata_pipelines.balance import drawn_batches
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.virtual_ranks import deal_to_virtual, num_rounds

_LARGEST_UINT16 = 2**16


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
                rounds=num_rounds(self.virtual_ranks, 1),
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
