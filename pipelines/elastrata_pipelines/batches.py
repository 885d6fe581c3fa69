"""From stored stripes to each rank's rows of consecutive steps. Reads files; knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from elastrata_pipelines.deal import Deal, WorkModel, deal, num_micro_batches
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import BatchSizeWarmup, Group, Groups
from elastrata_pipelines.mixture import MixedOrder, MixedPlaces, Mixture
from elastrata_pipelines.order import Ints, Order
from elastrata_pipelines.payload import Counts, StepLayout, encode
from elastrata_pipelines.speeds import RankKind, RankKinds, Speeds, different
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import MixedStripes, Reader, Stripes
from elastrata_pipelines.virtual_ranks import deal_to_virtual

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
class Source:
    """A data set that is mixed with others."""

    name: str
    url: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The global batches of one data set, or of a mixture, dealt. A value: it can be sent to any
    process."""

    url: str
    """Of a mixture, that of its first source."""
    manifest: Manifest
    """Likewise; what it says of tokenizer and form is true of all."""
    order: Order | MixedOrder
    work: WorkModel
    tokens_per_micro_batch: int
    virtual_ranks: int | None = None
    """None: batches are dealt to as many ranks as there are."""
    micro_batch_multiple: int = 1
    """Every rank gets a multiple of so many micro-batches."""
    larger_budgets: tuple[int, ...] = ()
    """Other numbers of tokens that ranks may cut their rows by, each more than
    `tokens_per_micro_batch`."""
    sources: tuple[Source, ...] = ()
    """Those of a mixture, in its order; none where there is one data set."""

    @property
    def mixture(self) -> Mixture | None:
        """That of its sources."""
        return self.order.mixture if isinstance(self.order, MixedOrder) else None

    @property
    def data_sets(self) -> tuple[tuple[str, Manifest], ...]:
        """Place and manifest of every data set that is read."""
        sources = tuple((source.url, source.manifest) for source in self.sources)
        return sources or ((self.url, self.manifest),)

    @property
    def samples(self) -> int:
        """Samples of all its data sets."""
        return sum(manifest.samples for _, manifest in self.data_sets)

    @property
    def tokens_per_sample(self) -> float:
        """Mean over its samples; of a mixture, over those at its first and its last shares."""
        means = [manifest.tokens / manifest.samples for _, manifest in self.data_sets]
        if self.mixture is None:
            return means[0]
        ends = self.mixture.legs[0].shares, self.mixture.last_shares
        weights = [sum(both) for both in zip(*ends, strict=True)]
        return float(np.average(means, weights=weights))

    def placed(self, firsts: tuple[int, ...]) -> Batches:
        """The same, with the sources of a mixture read on from these positions; see `MixedOrder`.
        What is no mixture stays as it is."""
        if not isinstance(self.order, MixedOrder):
            return self
        return replace(self, order=replace(self.order, firsts=firsts))

    def mixed(self, mixture: Mixture) -> Batches:
        """The same sources in another mixture."""
        assert isinstance(self.order, MixedOrder), self.url
        return replace(self, order=replace(self.order, mixture=mixture))

    def stripes(self) -> Reader:
        """A reader of the data sets."""
        readers = [Stripes(Storage(url), manifest) for url, manifest in self.data_sets]
        return MixedStripes(readers) if self.sources else readers[0]

    def payloads(
        self,
        group: Group,
        num_ranks: int,
        stripes: Reader | None = None,
        *,
        speeds: Speeds = (),
        kinds: RankKinds = (),
    ) -> Iterator[pa.Buffer]:
        """Each rank's rows of the group's steps, encoded; rank after rank.

        Args:
            group: the steps.
            num_ranks: number of data-parallel ranks.
            stripes: the reader; whoever reads consecutive groups gives them the same one.
            speeds: of the data-parallel ranks; none: they are equally fast.
            kinds: of the data-parallel ranks, by their memory; none: they are of one kind.

        Raises:
            UserError: a shard is missing or damaged.
        """
        places = self.order.places(group.first_position, group.num_steps * group.batch_size)
        table, index = (stripes or self.stripes()).rows(places)
        lengths = table["length"].to_numpy()[index]
        sources = places.sources.astype(np.int32) if isinstance(places, MixedPlaces) else None
        parts = lengths.reshape(group.num_steps, group.batch_size)
        deals = [self._deal(part, num_ranks, speeds, kinds) for part in parts]
        counts = [self._counts(*both, kinds) for both in zip(deals, parts, strict=True)]
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
                    rounds=dealt.rounds,
                    counts=counts[k],
                    sources=tuple(source.name for source in self.sources),
                    work=int(self.work(parts[k][hand.rows]).sum()),
                )
                for k, (hand, dealt) in enumerate(zip(hands, deals, strict=True))
            ]
            yield encode(
                table.take(index[rows]),
                places.epochs[rows],
                steps,
                speeds,
                None if sources is None else sources[rows],
                rank=rank,
                num_ranks=num_ranks,
            )

    def groups(
        self,
        start: Start,
        *,
        steps: int,
        batch_size: int,
        max_tokens: int,
        warmup: BatchSizeWarmup | None = None,
        max_steps: int | None = None,
        before: int = 0,
    ) -> Groups:
        """The groups from `start` to step `steps`, of up to `max_steps` steps and some `max_tokens`
        tokens; `before`: steps of the run before these."""
        per_step = max(1, int(batch_size * self.tokens_per_sample))
        return Groups(
            done=start.step,
            position=start.samples,
            steps=steps,
            batch_size=batch_size,
            most=max(1, min(max_tokens // per_step, max_steps or steps)),
            warmup=warmup,
            before=before,
        )

    def _deal(self, lengths: Ints, num_ranks: int, speeds: Speeds, kinds: RankKinds) -> Deal:
        common: dict[str, Any] = {
            "num_ranks": num_ranks,
            "work": self.work,
            "tokens_per_micro_batch": self.tokens_per_micro_batch,
            "multiple": self.micro_batch_multiple,
            "speeds": speeds,
        }
        if self.virtual_ranks is None:
            budgets = [kind.budget(self.tokens_per_micro_batch) for kind in kinds]
            return deal(lengths, **common, budgets=budgets)
        return deal_to_virtual(lengths, virtual_ranks=self.virtual_ranks, **common)

    def _counts(self, dealt: Deal, lengths: Ints, kinds: RankKinds) -> Counts:
        """By kind of rank and each of several budgets, the micro-batches of every rank, were there
        no other kinds; none where there is one budget."""
        if not self.larger_budgets:
            return ()
        rows: dict[RankKind, list[Ints]] = {kind: [] for kind in different(kinds)}
        for kind, hand in zip(kinds or different(()) * len(dealt.hands), dealt.hands, strict=True):
            rows[kind].append(hand.rows)
        return tuple(self._counts_of(lengths, *of_kind) for of_kind in rows.items())

    def _counts_of(self, lengths: Ints, kind: RankKind, rows: list[Ints]) -> dict[int, int]:
        return {
            budget: num_micro_batches(
                rows, lengths, [budget] * len(rows), self.micro_batch_multiple
            )
            for budget in (self.tokens_per_micro_batch, *self.larger_budgets)
            if kind.budget(budget) == budget
        }
