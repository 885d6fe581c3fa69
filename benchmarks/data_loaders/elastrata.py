"""Elastrata: through Ray Data as a training run gets it, and in process without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from data_loaders.samples import BATCH_SIZE, SHUFFLE_BUFFER, Batch
from elastrata.cluster.ray_session import ray_session
from elastrata_pipelines.batches import MAX_GROUP_TOKENS, Batches, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.order import Order
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.rows import Rows
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import RankStream, dealt, descriptors

EPOCHS = 64
"""Length of the run that is streamed: more than any measurement lasts."""


def through_ray(folder: Path) -> Iterator[Iterator[Batch]]:
    batches = _batches(folder)
    phases = [Phase(batches=batches, steps=_steps(batches), batch_size=BATCH_SIZE)]
    (split,) = dealt(descriptors(phases, Start()), phases, 1)
    return _epochs(RankStream(split, batches.manifest.token_dtype), batches.manifest.samples)


@contextmanager
def ray_until_streams_end() -> Iterator[None]:
    """A Ray that outlives the threads of the streams: they must not call one that is gone."""
    with ray_session("local"):
        others = set(threading.enumerate())
        yield
        for thread in set(threading.enumerate()) - others:
            thread.join(timeout=2)  # Ray may leave one parked for ever, which calls nothing


def in_process(folder: Path) -> Iterator[Iterator[Batch]]:
    batches = _batches(folder)
    groups = batches.groups(
        Start(), steps=_steps(batches), batch_size=BATCH_SIZE, max_tokens=MAX_GROUP_TOKENS
    )
    stripes = batches.stripes()
    steps = (
        step
        for group in groups
        for payload in batches.payloads(group, 1, stripes)
        for step in decode(payload, batches.manifest.token_dtype)
    )
    return _epochs(steps, batches.manifest.samples)


def _batches(folder: Path) -> Batches:
    manifest = Manifest.read(Storage(str(folder)))
    return Batches(
        url=str(folder),
        manifest=manifest,
        order=Order(
            num_samples=manifest.samples,
            stripe_size=manifest.stripe_size,
            window_stripes=SHUFFLE_BUFFER // manifest.stripe_size,
            seed=manifest.seed,
        ),
        work=WorkModel(linear=24 * 1024**2, quadratic=4 * 1024),
        tokens_per_micro_batch=BATCH_SIZE * manifest.seq_len,
    )


def _steps(batches: Batches) -> int:
    return EPOCHS * batches.manifest.samples // BATCH_SIZE


def _epochs(steps: Iterable[RankStep], num_samples: int) -> Iterator[Iterator[Batch]]:
    """Cuts the stream, in which epochs follow each other without a gap, where they end."""
    by_epoch = groupby(_parts(steps, num_samples), key=itemgetter(0))
    return (map(itemgetter(1), parts) for _, parts in by_epoch)


def _parts(steps: Iterable[RankStep], num_samples: int) -> Iterator[tuple[int, Batch]]:
    """Epoch and batch; a step that lies in two epochs gives each its part."""
    for step in steps:
        first, last = (
            position // num_samples
            for position in ((step.step - 1) * BATCH_SIZE, step.step * BATCH_SIZE - 1)
        )
        if first == last:
            yield first, (step.rows.tokens, step.rows.lengths)
        else:
            yield from ((epoch, _of_epoch(step.rows, epoch)) for epoch in (first, last))


def _of_epoch(rows: Rows, epoch: int) -> Batch:
    inside = rows.epochs == epoch
    return rows.tokens[np.repeat(inside, rows.lengths)], rows.lengths[inside]


VARIANTS = {"through Ray Data": through_ray, "in process": in_process}
SESSIONS = {"through Ray Data": ray_until_streams_end}
