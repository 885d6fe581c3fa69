"""Batches: turns stored stripes into each rank's rows of consecutive steps. Independent of Ray."""

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
from elastrata_pipelines.speeds import RankKind, RankKinds, Speeds, distinct_kinds
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stripes import MixedStripes, Reader, Stripes
from elastrata_pipelines.virtual_ranks import deal_to_virtual

MAX_GROUP_TOKENS = 8 * 2**20
"""Maximum number of tokens that are read and dealt together."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Progress of a run, from which a stream begins."""

    step: int = 0
    """Number of completed steps."""
    samples: int = 0
    """Number of samples already used, which is the position of the next one."""
    tokens: int = 0
    """Number of tokens already used, without padding."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set of a mixture."""

    name: str
    url: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The dealt global batches of a data set or a mixture. The value can be sent to any process."""

    url: str
    """URL of the data set; for a mixture, of its first source."""
    manifest: Manifest
    """Manifest of the same data set. Its tokenizer and sample format hold for all sources."""
    order: Order | MixedOrder
    work: WorkModel
    tokens_per_micro_batch: int
    virtual_ranks: int | None = None
    """Number of virtual ranks; None to deal batches to the actual ranks."""
    micro_batch_multiple: int = 1
    """The number of micro-batches of every rank is a multiple of this."""
    larger_budgets: tuple[int, ...] = ()
    """Other token budgets that ranks may use for their micro-batches, each above
    `tokens_per_micro_batch`."""
    sources: tuple[Source, ...] = ()
    """Sources of a mixture, in its order; empty for a single data set."""

    @property
    def mixture(self) -> Mixture | None:
        """Mixture of the sources, if there is one."""
        return self.order.mixture if isinstance(self.order, MixedOrder) else None

    @property
    def data_sets(self) -> tuple[tuple[str, Manifest], ...]:
        """URL and manifest of every data set that is read."""
        sources = tuple((source.url, source.manifest) for source in self.sources)
        return sources or ((self.url, self.manifest),)

    @property
    def samples(self) -> int:
        """Number of samples in all data sets."""
        return sum(manifest.samples for _, manifest in self.data_sets)

    @property
    def tokens_per_sample(self) -> float:
        """Mean number of tokens per sample; for a mixture, the mean at its first and last
        shares."""
        means = [manifest.tokens / manifest.samples for _, manifest in self.data_sets]
        if self.mixture is None:
            return means[0]
        ends = self.mixture.legs[0].shares, self.mixture.last_shares
        weights = [sum(both) for both in zip(*ends, strict=True)]
        return float(np.average(means, weights=weights))

    def placed(self, firsts: tuple[int, ...]) -> Batches:
        """Return a copy that reads the sources of a mixture from these positions on (see
        `MixedOrder`).

        A single data set is returned unchanged.
        """
        if not isinstance(self.order, MixedOrder):
            return self
        return replace(self, order=replace(self.order, firsts=firsts))

    def mixed(self, mixture: Mixture) -> Batches:
        """Return a copy with the same sources in another mixture."""
        assert isinstance(self.order, MixedOrder), self.url
        return replace(self, order=replace(self.order, mixture=mixture))

    def stripes(self) -> Reader:
        """Return a reader for the data sets."""
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
        """Yield each rank's encoded rows of the group's steps, in rank order.

        Args:
            group: the steps.
            num_ranks: number of data-parallel ranks.
            stripes: reader to use; pass the same one for consecutive groups to reuse its stripes.
            speeds: speeds of the data-parallel ranks; empty if they are equally fast.
            kinds: memory kinds of the data-parallel ranks; empty if they are all alike.

        Raises:
            UserError: a shard is missing or damaged.
        """
        places = self.order.places(group.first_position, group.num_steps * group.batch_size)
        # All steps of the group are read at once: consecutive batches come from the same stripes.
        table, index = (stripes or self.stripes()).rows(places)
        lengths = table["length"].to_numpy()[index]
        sources = places.sources.astype(np.int32) if isinstance(places, MixedPlaces) else None
        parts = lengths.reshape(group.num_steps, group.batch_size)
        deals = [self._deal(part, num_ranks, speeds, kinds) for part in parts]
        counts = [self._counts(*both, kinds) for both in zip(deals, parts, strict=True)]
        for rank in range(num_ranks):
            step_hands = [step_deal.hands[rank] for step_deal in deals]
            rows = np.concatenate(
                [hand.rows + k * group.batch_size for k, hand in enumerate(step_hands)]
            )
            steps = [
                StepLayout(
                    # Steps are counted from 1, `first_step` is the number of completed steps.
                    step=group.first_step + k + 1,
                    cuts=hand.cuts.tolist(),
                    imbalance=step_deal.imbalance,
                    rounds=step_deal.rounds,
                    counts=counts[k],
                    sources=tuple(source.name for source in self.sources),
                    work=int(self.work(parts[k][hand.rows]).sum()),
                )
                for k, (hand, step_deal) in enumerate(zip(step_hands, deals, strict=True))
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
        """Return the groups from `start` to step `steps`.

        A group has at most `max_steps` steps and about `max_tokens` tokens. `before` is the number
        of steps of the run before this phase.
        """
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
        # Without the budgets of kinds: the content of virtual ranks must not depend on memory.
        return deal_to_virtual(lengths, virtual_ranks=self.virtual_ranks, **common)

    def _counts(self, step_deal: Deal, lengths: Ints, kinds: RankKinds) -> Counts:
        """Return the micro-batches of every rank for each kind of rank and each budget.

        Each count assumes that all ranks are of that kind. The result is empty if there is only one
        budget.
        """
        if not self.larger_budgets:
            return ()
        rows: dict[RankKind, list[Ints]] = {kind: [] for kind in distinct_kinds(kinds)}
        for kind, hand in zip(
            kinds or distinct_kinds(()) * len(step_deal.hands), step_deal.hands, strict=True
        ):
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
