"""Batches of several sources: the same samples at any number of ranks, each from its own place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from elastrata_pipelines.batches import Batches, Source, Start
from elastrata_pipelines.deal import WorkModel, deal
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import Group
from elastrata_pipelines.hashing import combine, digest, key, uniform
from elastrata_pipelines.mixture import Leg, MixedOrder, Mixture, shares_to_units
from elastrata_pipelines.order import Order
from elastrata_pipelines.payload import RankStep, decode
from elastrata_pipelines.phase import Origin, Phase, compute_positions_after, place_phases
from elastrata_pipelines.storage import Storage
from support.synthetic import write_data_set

SIZES = {"web": 400, "code": 150, "books": 90}
SHARES = shares_to_units([5, 3, 2])
BATCH = 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, ...]:
    folder, found = tmp_path_factory.mktemp("sources"), []
    for seed, (name, samples) in enumerate(SIZES.items()):
        write_data_set(folder / name, samples=samples, seed=seed % 2)  # two have the same ids
        manifest = Manifest.read(Storage(str(folder / name)))
        found.append(Source(name=name, url=str(folder / name), manifest=manifest))
    return tuple(found)


def mixed(sources: tuple[Source, ...], *legs: Leg) -> Batches:
    orders = tuple(order_of(source) for source in sources)
    firsts = (0,) * len(sources)
    return Batches(
        url=sources[0].url,
        manifest=sources[0].manifest,
        order=MixedOrder(mixture=Mixture(legs), orders=orders, firsts=firsts),
        work=WorkModel(linear=1, quadratic=1),
        tokens_per_micro_batch=96,
        sources=sources,
    )


def order_of(source: Source) -> Order:
    manifest = source.manifest
    return Order(
        num_samples=manifest.samples, stripe_size=manifest.stripe_size, window_stripes=2, seed=5
    )


@pytest.fixture(scope="module")
def batches(sources: tuple[Source, ...]) -> Batches:
    return mixed(sources, Leg(shares=SHARES))


def steps_of(batches: Batches, group: Group, num_ranks: int) -> list[list[RankStep]]:
    """Of every rank the steps of a group."""
    return [list(decode(payload, "uint16")) for payload in batches.payloads(group, num_ranks)]


def test_any_number_of_ranks_gets_the_same_batch_of_the_same_sources(batches: Batches) -> None:
    group = Group(first_step=0, first_position=120, num_steps=3, batch_size=BATCH)
    told = set()
    for num_ranks in (1, 2, 3, 16):
        ranks = steps_of(batches, group, num_ranks)
        for number in range(group.num_steps):
            rows = [rank[number].rows for rank in ranks]
            counted = np.bincount(np.concatenate([one.sources for one in rows]), minlength=3)
            whole = sum(digest(one.identities) for one in rows) % 2**64
            told.add((number, tuple(counted.tolist()), whole))
    assert len(told) == group.num_steps
    assert all(np.abs(np.subtract(counts, (20, 12, 8))).max() <= 1 for _, counts, _ in told)


def test_every_sample_is_that_of_its_source(batches: Batches) -> None:
    """Rows hold what the sources' own order has at their positions."""
    group = Group(first_step=0, first_position=0, num_steps=5, batch_size=BATCH)
    ((*steps,),) = steps_of(batches, group, 1)
    counts = batches.mixture.counts(5 * BATCH) if batches.mixture else ()
    for number, source in enumerate(batches.sources):
        alone = replace(batches, url=source.url, manifest=source.manifest, sources=())
        alone = replace(alone, order=order_of(source))
        own = Group(first_step=0, first_position=0, num_steps=1, batch_size=counts[number])
        ((expected,),) = steps_of(alone, own, 1)
        rows = [step.rows for step in steps]
        ids = np.concatenate([one.sample_ids[one.sources == number] for one in rows])
        assert sorted(ids.tolist()) == sorted(expected.rows.sample_ids.tolist())


def test_equal_ids_of_two_sources_are_two_samples(batches: Batches) -> None:
    group = Group(first_step=0, first_position=0, num_steps=1, batch_size=BATCH)
    ((step,),) = steps_of(batches, group, 1)
    web, books = (step.rows.sources == number for number in (0, 2))
    stored = [
        pytest.importorskip("pyarrow.parquet").read_table(f"{source.url}/shards/00000.parquet")
        for source in (batches.sources[0], batches.sources[2])
    ]
    assert set(stored[1]["sample_id"].to_pylist()) & set(stored[0]["sample_id"].to_pylist())
    assert not {*step.rows.identities[web].tolist()} & {*step.rows.identities[books].tolist()}


def test_the_deal_is_as_even_as_of_one_source() -> None:
    """1,024 ranks with 16 samples each, of three sources with lengths of their own."""
    mixture, size = Mixture((Leg(shares=SHARES),)), 1024 * 16
    drawn = mixture.draw(10**9, size)
    chance = uniform(combine(key(1), np.arange(size, dtype=np.uint64)))
    means = np.array([400, 120, 60])[drawn.sources]
    lengths = np.minimum(512, 4 - means * np.log1p(-chance)).astype(np.int64)
    work = WorkModel(linear=6 * 768, quadratic=1)
    dealt = deal(lengths, num_ranks=1024, work=work, tokens_per_micro_batch=8192)
    assert dealt.imbalance <= 1.002
    counted = np.bincount(drawn.sources, minlength=3)
    assert np.abs(counted - size * np.array([0.5, 0.3, 0.2])).max() <= 1


def planned(sources: tuple[Source, ...]) -> list[Phase]:
    """Two sources; all three, with shares that change; one of them alone."""
    two = mixed(sources[:2], Leg(shares=shares_to_units([3, 1])))
    ramp = Leg(shares=SHARES, final_shares=shares_to_units([1, 3, 6]), length=9 * BATCH)
    alone = replace(two, order=order_of(sources[1]), sources=(), url=sources[1].url)
    return [
        Phase(batches=two, steps=6, batch_size=30),
        Phase(batches=mixed(sources, ramp), steps=9, batch_size=BATCH),
        Phase(batches=replace(alone, manifest=sources[1].manifest), steps=4, batch_size=10),
    ]


def taken(phases: tuple[Phase, ...], start: Start) -> list[tuple[int, list[int]]]:
    """Identities of every step that is left."""
    found = []
    for phase in phases:
        for group in phase.groups(start, max_tokens=3000):
            ((*steps,),) = steps_of(phase.batches, group, 1)
            found += [(step.step, sorted(step.rows.identities.tolist())) for step in steps]
    return found


@pytest.mark.parametrize("done", [0, 3, 6, 10, 16])
def test_it_goes_on_from_any_step(sources: tuple[Source, ...], done: int) -> None:
    phases = place_phases(planned(sources))
    samples = [30] * 6 + [BATCH] * 9 + [10] * 4
    start = Start(step=done, samples=sum(samples[:done]))
    assert taken(phases, start) == taken(phases, Start())[done:]


def test_each_source_goes_on_where_it_was(sources: tuple[Source, ...]) -> None:
    """From phase to phase none of its samples is left out or comes twice in an epoch."""
    phases = place_phases(planned(sources))
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    seen = compute_positions_after(19, [phase.size for phase in phases], data)
    assert sum(seen.values()) == 6 * 30 + 9 * BATCH + 40
    for number, source in enumerate(sources):
        ids = list[int]()
        for phase in phases:
            for group in phase.groups(Start(), max_tokens=3000):
                ((*steps,),) = steps_of(phase.batches, group, 1)
                for rows in (step.rows for step in steps):
                    of_source = (
                        rows.sources == number
                        if rows.sources is not None
                        else np.full(len(rows), phase.batches.url == source.url)
                    )
                    ids += rows.sample_ids[of_source].tolist()
        times = np.unique(ids, return_counts=True)[1]
        assert len(ids) == seen[source.url]
        assert times.max() - times.min() <= 1 or len(times) < source.manifest.samples
        assert times.max() == -(-len(ids) // source.manifest.samples)


def test_a_fork_with_the_same_shares_is_the_run_itself(sources: tuple[Source, ...]) -> None:
    phases = place_phases(planned(sources))
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    start = Start(step=9, samples=6 * 30 + 3 * BATCH)
    seen = compute_positions_after(9, [phase.size for phase in phases], data)
    origin = Origin(step=9, samples=start.samples, positions=seen)
    forked = place_phases(planned(sources), origin)
    assert taken(forked, start) == taken(phases, start)


def test_a_fork_with_other_shares_reads_on(sources: tuple[Source, ...]) -> None:
    phases = place_phases(planned(sources))
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    start = Start(step=9, samples=6 * 30 + 3 * BATCH)
    seen = compute_positions_after(9, [phase.size for phase in phases], data)
    changed = planned(sources)
    changed[1] = replace(changed[1], batches=mixed(sources, Leg(shares=shares_to_units([0, 1, 9]))))
    origin = Origin(step=9, samples=start.samples, positions=seen)
    forked = place_phases(changed, origin)
    after = compute_positions_after(15, [phase.size for phase in forked], data, origin)
    gained = [after[source.url] - seen.get(source.url, 0) for source in sources]
    assert sum(gained) == 6 * BATCH
    assert gained[0] == 0
    assert abs(gained[2] - 0.9 * 6 * BATCH) <= 1
    places = forked[1].batches.order.places(forked[1].placement.first_position, 6 * BATCH)
    books = places.epochs * SIZES["books"] + places.stripes * 32 + places.rows
    expected = order_of(sources[2]).places(seen[sources[2].url], gained[2])
    own = expected.epochs * SIZES["books"] + expected.stripes * 32 + expected.rows
    assert np.array_equal(books[places.sources == 2], own)  # type: ignore[attr-defined]


def test_an_exhausted_source_gives_its_share_to_the_others(sources: tuple[Source, ...]) -> None:
    phase = Phase(
        batches=mixed(sources, Leg(shares=SHARES)),
        steps=30,
        batch_size=BATCH,
        limits=(None, None, 180),
        redistributes=True,
    )
    phases = place_phases([phase, replace(phase, steps=5)])
    data = [[url for url, _ in phase.batches.data_sets] for phase in phases]
    seen = compute_positions_after(35, [phase.size for phase in phases], data)
    assert seen[sources[2].url] == 180
    assert sum(seen.values()) == 35 * BATCH
    left = 35 * BATCH - 900
    assert abs(seen[sources[0].url] - 450 - left * 5 / 8) <= 2
    assert taken(phases, Start(step=24, samples=24 * BATCH)) == taken(phases, Start())[24:]
