"""A lone rank's steps of a data set, read, dealt and decoded in this process, without Ray."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.payload import RankStep, decode

MAX_GROUP_TOKENS = 8 * 2**20
"""Read and dealt at once, as `elastrata_pipelines.stream` does."""


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
