"""From stored stripes to each rank's rows of consecutive steps. Reads files; knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from elastrata_pipelines.batch_size_warmup import (
    BatchSizeWarmup,
    batch_size_at,
    steps_of_equal_size,
)
from elastrata_pipelines.deal import Deal, WorkModel, num_micro_batches
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.order import Ints, Order, Places
from elastrata_pipelines.payload import StepLayout, encode
from elastrata_pipelines.retry import with_retries
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.virtual_ranks import deal_to_virtual, num_rounds

MAX_GROUP_TOKENS = 8 * 2**20
"""Read and dealt at once, at most."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a stream begins: how far the run is."""

    step: int = 0
    """Steps done."""
    samples: int = 0
    """Samples seen: the position of the next one."""
    tokens: int = 0
    """Real tokens seen."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Consecutive steps that are read and dealt together."""

    first_step: int
    """Steps done before this group."""
    first_position: int
    num_steps: int
    batch_size: int


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The global batches of one data set, dealt. A value: it can be sent to any process."""

    url: str
    manifest: Manifest
    order: Order
    work: WorkModel
    tokens_per_micro_batch: int
    virtual_ranks: int | None = None
    """None: batches are dealt to as many ranks as there are."""
    micro_batch_multiple: int = 1
    """Every rank gets a multiple of so many micro-batches."""
    larger_budgets: tuple[int, ...] = ()
    """Other numbers of tokens that ranks may cut their rows by, each more than
    `tokens_per_micro_batch`."""

    def stripes(self) -> Stripes:
        """A reader of the data set."""
        return Stripes(Storage(self.url), self.manifest)

    def payloads(
        self, group: Group, num_ranks: int, stripes: Stripes | None = None
    ) -> Iterator[pa.Buffer]:
        """Each rank's rows of the group's steps, encoded; rank after rank.

        Args:
            group: the steps.
            num_ranks: number of data-parallel ranks.
            stripes: the reader; whoever reads consecutive groups gives them the same one.

        Raises:
            UserError: a shard is missing or damaged.
        """
        places = self.order.places(group.first_position, group.num_steps * group.batch_size)
        table, index = _read(stripes or self.stripes(), places)
        lengths = table["length"].to_numpy()[index]
        parts = lengths.reshape(group.num_steps, group.batch_size)
        deals = [self._deal(part, num_ranks) for part in parts]
        counts = [self._counts(*both) for both in zip(deals, parts, strict=True)]
        for rank in range(num_ranks):
            hands = [dealt.hands[rank] for dealt in deals]
            rows = np.concatenate(
                [hand.rows + k * group.batch_size for k, hand in enumerate(hands)]
            )
            steps = [
                StepLayout(
                    step=group.first_step + k + 1,
                    cuts=hand.cuts.tolist(),
                    imbalance=dealt.imbalance,
                    rounds=num_rounds(self.virtual_ranks or num_ranks, num_ranks),
                    counts=counts[k],
                )
                for k, (hand, dealt) in enumerate(zip(hands, deals, strict=True))
            ]
            yield encode(table.take(index[rows]), places.epochs[rows], steps)

    def groups(
        self,
        start: Start,
        *,
        steps: int,
        batch_size: int,
        max_tokens: int,
        warmup: BatchSizeWarmup | None = None,
    ) -> list[Group]:
        """The groups from `start` to step `steps`: a single step first, then doubling in size up
        to about `max_tokens` tokens, so that the first batch comes soon and the rest in bulk. All
        steps of a group have one batch size."""
        per_step = max(1, batch_size * self.manifest.tokens // self.manifest.samples)
        most = max(1, max_tokens // per_step)
        groups: list[Group] = []
        step, position, size = start.step, start.samples, 1
        while step < steps:
            group = Group(
                first_step=step,
                first_position=position,
                num_steps=steps_of_equal_size(
                    step, min(size, steps - step), full=batch_size, warmup=warmup
                ),
                batch_size=batch_size_at(step, full=batch_size, warmup=warmup),
            )
            groups.append(group)
            step, position = step + group.num_steps, position + group.num_steps * group.batch_size
            size = min(2 * size, most)
        return groups

    def _deal(self, lengths: Ints, num_ranks: int) -> Deal:
        return deal_to_virtual(
            lengths,
            virtual_ranks=self.virtual_ranks or num_ranks,
            num_ranks=num_ranks,
            work=self.work,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            multiple=self.micro_batch_multiple,
        )

    def _counts(self, dealt: Deal, lengths: Ints) -> dict[int, int]:
        """By each of the larger budgets, the micro-batches of every rank."""
        rows = [hand.rows for hand in dealt.hands]
        return {
            budget: num_micro_batches(rows, lengths, budget, self.micro_batch_multiple)
            for budget in self.larger_budgets
        }


def _read(stripes: Stripes, places: Places) -> tuple[pa.Table, Ints]:
    """The stripes that hold `places` as one table, and the places as indices into it."""
    numbers, which = np.unique(places.stripes, return_inverse=True)
    tables = stripes.read(numbers.tolist())
    starts = np.cumsum([0] + [table.num_rows for table in tables])
    return pa.concat_tables(tables).combine_chunks(), starts[which] + places.rows


class Stripes:
    """Reads stripes, and keeps those of the last call.

    A group of steps mostly ends inside a window of the order, whose stripes the next one begins
    with: without this they would be read twice.
    """

    def __init__(self, storage: Storage, manifest: Manifest) -> None:
        self._storage = storage
        self._manifest = manifest
        self._kept: dict[int, pa.Table] = {}

    def read(self, stripes: Sequence[int]) -> list[pa.Table]:
        """The stripes of these numbers, one table each. A remote storage that does not answer for a
        while is waited for.

        Raises:
            UserError: a shard is missing or damaged.
        """
        missing = [stripe for stripe in stripes if stripe not in self._kept]
        tables = with_retries(
            lambda: read_stripes(self._storage, self._manifest, missing),
            is_local=self._storage.is_local,
        )
        known = self._kept | dict(zip(missing, tables, strict=True))
        self._kept = {stripe: known[stripe] for stripe in stripes}
        return list(self._kept.values())
