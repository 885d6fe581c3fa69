"""The input pipeline, measured: tokens per second that reach the workers, and the first batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase


@dataclass(frozen=True, kw_only=True)
class InputFigures:
    """Figures after the warm-up. Each token is read once by its worker."""

    workers: int
    through: str
    """`this process`, or `Ray Data`."""
    steps: int
    samples: int
    tokens: int
    seconds: float
    """The worker that took longest."""
    tokens_per_second: float
    """All workers together."""
    seconds_to_first_batch: float
    """From asking for it, on the worker that waited longest; the start of Ray and of its processes
    is not counted."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """Figures of one worker."""

    steps: int
    samples: int
    tokens: int
    seconds: float
    seconds_to_first_batch: float


def read_here(batches: Batches, *, batch_size: int, steps: int, warm_up: int) -> InputFigures:
    """Reads `warm_up` and then `steps` steps of a run on one worker, in this process.

    Raises:
        UserError: a shard is missing or damaged.
    """
    asked = time.perf_counter()
    stream = rank_steps(batches, batch_size=batch_size, steps=warm_up + steps)
    return _figures([_take(stream, asked, warm_up)], "this process")


def read_through_ray(
    batches: Batches, *, workers: int, batch_size: int, steps: int, warm_up: int
) -> InputFigures:
    """Reads through Ray Data, to so many workers, each a process; in an open Ray session."""
    import ray

    from elastrata_pipelines.stream import dealt, descriptors

    phases = [Phase(batches=batches, steps=warm_up + steps, batch_size=batch_size)]
    splits = dealt(descriptors(phases, Start()), phases, workers)
    taker: Any = ray.remote(num_cpus=0)(_Taker)
    takers = [taker.remote() for _ in splits]
    ray.get([taker.ready.remote() for taker in takers])
    taken = ray.get(
        [
            taker.take.remote(split, batches.manifest.token_dtype, warm_up)
            for taker, split in zip(takers, splits, strict=True)
        ]
    )
    return _figures(taken, "Ray Data")


class _Taker:
    """A worker's process."""

    def ready(self) -> None:
        """Imports what reading needs, which is not counted."""
        import elastrata_pipelines.stream  # noqa: F401

    def take(self, split: Any, token_dtype: str, warm_up: int) -> _Taken:
        """Takes all of this worker's part, a `DataIterator`."""
        from elastrata_pipelines.stream import RankStream

        asked = time.perf_counter()
        return _take(RankStream(split, token_dtype), asked, warm_up)


def _take(stream: Iterable[RankStep], asked: float, warm_up: int) -> _Taken:
    """Reads every token of every step; those after the first `warm_up` steps count."""
    first, began, now = 0.0, asked, asked
    steps = samples = tokens = 0
    for number, step in enumerate(stream):
        step.rows.tokens.sum(dtype=np.uint64)
        now = time.perf_counter()
        if number == 0:
            first = now - asked
        if number < warm_up:
            began = now
            continue
        steps, samples = steps + 1, samples + len(step.rows)
        tokens += len(step.rows.tokens)
    return _Taken(
        steps=steps,
        samples=samples,
        tokens=tokens,
        seconds=now - began,
        seconds_to_first_batch=first,
    )


def _figures(taken: Sequence[_Taken], through: str) -> InputFigures:
    tokens = sum(worker.tokens for worker in taken)
    seconds = max(worker.seconds for worker in taken)
    return InputFigures(
        workers=len(taken),
        through=through,
        steps=taken[0].steps,
        samples=sum(worker.samples for worker in taken),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        seconds_to_first_batch=max(worker.seconds_to_first_batch for worker in taken),
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
