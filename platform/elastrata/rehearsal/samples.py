"""The samples of a rehearsed step: those that one rank of many would have, with random tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elastrata.core.mesh import DataRank
from elastrata.recipe.data_spec import DataSpec
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.deal import Ints, deal
from elastrata_pipelines.payload import RankStep
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.virtual_ranks import deal_to_virtual

_LARGEST_UINT16 = 2**16


def rank_steps(
    recipe: Recipe, tokens: int, spec: DataSpec, rank: DataRank, lengths: Sequence[Ints]
) -> Iterator[RankStep]:
    """A rank's part of steps, as the deal has it.

    Args:
        recipe: whose batches these are, without phases.
        tokens: of a micro-batch, at most.
        spec: the form of samples.
        rank: among the data ranks.
        lengths: of the samples of every step's global batch, each of shape [batch_size].
    """
    rng = np.random.default_rng(recipe.seed)
    parallel = recipe.parallel
    virtual = parallel.virtual_ranks
    for number, batch in enumerate(lengths):
        common: dict[str, Any] = {
            "num_ranks": rank.dp_size,
            "work": recipe.workload.work(spec.vocabulary),
            "tokens_per_micro_batch": tokens,
            "multiple": parallel.micro_batch_multiple,
        }
        dealt = (
            deal_to_virtual(batch, virtual_ranks=virtual, **common)
            if virtual
            else deal(batch, **common)
        )
        hand = dealt.hands[rank.rank]
        yield RankStep(
            step=number + 1,
            rows=_rows(batch[hand.rows], hand.rows, spec, rng),
            cuts=hand.cuts,
            imbalance=dealt.imbalance,
            rounds=dealt.rounds,
        )


def shortened(step: RankStep, micro_batches: int) -> RankStep:
    """The step with its first micro-batches alone; as it is where there are several rounds."""
    if step.rounds > 1 or micro_batches >= len(step.micro_batches):
        return step
    cuts = step.cuts[: micro_batches + 1]
    rows, _ = step.rows.split(np.array([0, cuts[-1], len(step.rows)]))
    return replace(step, rows=rows, cuts=cuts)


def full(recipe: Recipe, spec: DataSpec, steps: int) -> list[Ints]:
    """Lengths of batches whose samples all have the full length."""
    return [np.full(recipe.batch_size, spec.seq_len, dtype=np.int64)] * steps


def varying(recipe: Recipe, spec: DataSpec, steps: int) -> list[Ints]:
    """Lengths of batches that differ from sample to sample, from an eighth of the full one on."""
    rng = np.random.default_rng(recipe.seed)
    least = max(4, spec.seq_len // 8)
    return [
        rng.integers(least, spec.seq_len + 1, size=recipe.batch_size, dtype=np.int64)
        for _ in range(steps)
    ]


def _rows(lengths: Ints, ids: Ints, spec: DataSpec, rng: np.random.Generator) -> Rows:
    dtype = np.uint16 if spec.vocabulary.size <= _LARGEST_UINT16 else np.uint32
    return Rows(
        sample_ids=ids.astype(np.uint64),
        epochs=np.zeros(len(lengths), dtype=np.int64),
        lengths=lengths,
        tokens=rng.integers(spec.vocabulary.size, size=int(lengths.sum()), dtype=dtype),
        second_starts=lengths // 2 if spec.pairs else None,
        is_next=rng.random(len(lengths)) < 0.5 if spec.pairs else None,
    )
