"""The expectation: what every step of a run must have seen, by its data set and recipe alone.

Nothing here comes from the run's own records but where a step begins and how many samples it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.format import FileEntry, Manifest, open_shard
from elastrata_pipelines.hashing import U64, digest
from elastrata_pipelines.order import Order
from elastrata_pipelines.rows import mixed_ids
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """The samples at every position of a run."""

    order: Order
    sample_ids: U64
    """The ids of all samples in stored order (stripe after stripe), shape [num_samples]."""

    def digest_of(self, first: int, count: int) -> str:
        """The digest of the samples at positions first .. first + count - 1, as records have it."""
        return f"{self.part_of_digest(first, count):016x}"

    def part_of_digest(self, first: int, count: int, source: int | None = None) -> int:
        """The digest of the samples at positions first .. first + count - 1; digests of parts of a
        step add up to its own.

        Args:
            first: position.
            count: of samples.
            source: their number in the step's mixture; None: it is none.
        """
        ids = self.sample_ids[self._places(first, count)]
        return digest(ids if source is None else mixed_ids(source, ids))

    def partition_problems(self, batches: Sequence[tuple[int, int]]) -> list[str]:
        """One line for every epoch whose samples do not each occur once.

        Args:
            batches: first position and number of samples of every step. The last epoch they
                reach may be incomplete: there, no sample may occur twice.
        """
        size = self.order.num_samples
        stop = max((first + count for first, count in batches), default=0)
        spans: dict[int, list[tuple[int, int]]] = {}
        for first, count in _joined(batches):
            for epoch, start, length in _cut(first, count, size):
                spans.setdefault(epoch, []).append((start, length))
        problems = []
        for epoch in sorted(spans):
            places = np.concatenate([self._places(*span) for span in spans[epoch]])
            counts = np.bincount(places, minlength=size)
            if twice := int((counts > 1).sum()):
                problems.append(f"epoch {epoch}: {twice:,} samples seen more than once")
            if stop >= (epoch + 1) * size and (never := int((counts == 0).sum())):
                problems.append(f"epoch {epoch}: {never:,} samples never seen")
        return problems

    def _places(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Where the samples at so many positions are in stored order."""
        places = self.order.places(first, count)
        return places.stripes * self.order.stripe_size + places.rows


def expectation(
    data: Storage, manifest: Manifest, *, seed: int, window_stripes: int
) -> Expectation:
    """The samples that a run on that data set must see. Reads the ids of all samples, eight bytes
    each.

    Raises:
        UserError: a shard is missing or damaged.
    """
    parts = [_sample_ids(data, manifest, shard) for shard in manifest.shards]
    return Expectation(
        order=Order(
            num_samples=manifest.samples,
            stripe_size=manifest.stripe_size,
            window_stripes=window_stripes,
            seed=seed,
        ),
        sample_ids=np.concatenate(parts),
    )


def _sample_ids(data: Storage, manifest: Manifest, shard: FileEntry) -> U64:
    with open_shard(data, manifest, shard) as reader:
        ids: U64 = reader.read(["sample_id"], use_threads=False)["sample_id"].to_numpy()
    if len(ids) != shard.samples:
        raise UserError(f"{data.uri(shard.path)}: {len(ids)} samples, expected {shard.samples}")
    return ids


def _joined(batches: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The batches as few spans of positions: those that follow on one another become one."""
    spans: list[tuple[int, int]] = []
    for first, count in batches:
        if spans and sum(spans[-1]) == first:
            spans[-1] = (spans[-1][0], spans[-1][1] + count)
        else:
            spans.append((first, count))
    return spans


def _cut(first: int, count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Epoch, first position and length of a span's part in every epoch of `size` positions."""
    stop = first + count
    while first < stop:
        epoch = first // size
        end = min(stop, (epoch + 1) * size)
        yield epoch, first, end - first
        first = end
