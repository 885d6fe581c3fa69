"""The stream through the real Ray Data: every rank gets exactly its part, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from elastrata.parallel.mesh import data_rank
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import Group
from elastrata_pipelines.hashing import digest
from elastrata_pipelines.node_rows import SharedRows
from elastrata_pipelines.order import Order
from elastrata_pipelines.payload import RankStep, WrongStepError, check_order, decode
from elastrata_pipelines.phase import Phase, place_phases
from elastrata_pipelines.speeds import FixedSpeeds, RankKind
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.stream import (
    RankStream,
    descriptors,
    join_groups,
    most_tokens,
    parts_of,
    split_dealt_groups,
    tables_of,
)
from support.synthetic import write_data_set

STEPS, BATCH = 23, 29
MATRIX = pytest.mark.matrix


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Batches:
    folder = tmp_path_factory.mktemp("data")
    manifest = write_data_set(folder, samples=300)  # 23 steps of 29 run into the third epoch
    return Batches(
        url=str(folder),
        manifest=Manifest.read(Storage(str(folder))),
        order=Order(num_samples=300, stripe_size=manifest.stripe_size, window_stripes=3, seed=7),
        work=WorkModel(linear=1000, quadratic=3),
        tokens_per_micro_batch=96,
    )


def _collect(iterator: Any) -> list[tuple[int, list[int], list[int], int]]:
    """Per step: number, sample ids, tokens' sums by row, micro-batches."""
    return [_summary(step) for step in RankStream(iterator, "uint16")]


def _summary(step: RankStep) -> tuple[int, list[int], list[int], int]:
    ends = np.cumsum(step.rows.lengths)
    sums = np.add.reduceat(step.rows.tokens.astype(np.int64), ends - step.rows.lengths)
    return (
        step.step,
        step.rows.sample_ids.tolist(),
        sums.tolist() if len(ends) else [],
        len(step.cuts) - 1,
    )


def _expected(batches: Batches) -> dict[int, tuple[int, ...]]:
    """Per step the sample ids of the global batch, straight from the order."""
    groups = batches.groups(Start(), steps=STEPS, batch_size=BATCH, max_tokens=2000)
    found = {}
    for group in groups:
        (payload,) = batches.payloads(group, 1)
        for step in decode(payload, "uint16"):
            found[step.step] = tuple(sorted(step.rows.sample_ids.tolist()))
    return found


def test_ranks_of_a_group_get_the_same_rows(ray_local, batches) -> None:
    phases = [Phase(batches=batches, steps=STEPS, batch_size=BATCH)]
    cube = split_dealt_groups(descriptors(phases, Start()), phases, 8, copies=2, repeats=2)
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(_collect, cube))
    apart = split_dealt_groups(descriptors(phases, Start()), phases, 2)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(_collect, apart)
    assert parts == [one, one, other, other] * 2
    assert one != other


@pytest.mark.parametrize(
    ("nodes", "copies", "repeats"),
    [
        ("aaab", 2, 1),
        *(
            pytest.param(nodes, *shared, marks=MATRIX)
            for nodes in ("aaaaaaaa", "aaaaaabb", "aaabbbcc", "abcabcab")
            for shared in ((1, 1), (2, 1), (1, 2), (2, 2))
        ),
    ],
)
def test_ranks_of_shared_nodes_get_the_same_rows(
    ray_local, batches, nodes, copies, repeats
) -> None:
    """Whatever the nodes, every rank gets what it gets alone on its node."""
    phases = [Phase(batches=batches, steps=STEPS, batch_size=BATCH)]
    own = [data_rank(rank, len(nodes), copies, repeats).rank for rank in range(len(nodes))]
    num_ranks = len(nodes) // copies // repeats
    apart = split_dealt_groups(descriptors(phases, Start()), phases, num_ranks)
    with ThreadPoolExecutor(num_ranks) as pool:
        expected = list(pool.map(_collect, apart))
    splits = split_dealt_groups(
        descriptors(phases, Start()), phases, nodes, copies=copies, repeats=repeats
    )
    shared = {
        node: SharedRows(tables_of(splits[nodes.index(node)]), nodes.count(node))
        for node in set(nodes)
    }

    def collect(rank: int) -> Any:
        node, reader = nodes[rank], nodes[:rank].count(nodes[rank])
        return _collect(parts_of(shared[node], own[rank], reader))

    with ThreadPoolExecutor(len(nodes)) as pool:
        parts = list(pool.map(collect, range(len(nodes))))
    assert parts == [expected[rank] for rank in own]


def test_large_clusters_read_larger_groups(batches) -> None:
    assert most_tokens(1, 1) == most_tokens(8, 8) == 8 * 2**20
    assert most_tokens(32, 32) == 16 * 2**20 == 32 * 2**19
    assert most_tokens(64, 8) == 12 * 2**20  # the nodes' limit
    assert most_tokens(1024, 128) == most_tokens(4096, 512) == 64 * 2**20
    begin = Start(step=5, samples=5 * BATCH)
    groups = list(batches.groups(begin, steps=1000, batch_size=BATCH, max_tokens=3 * 29 * 20))
    for most in (1, 3, 50, 2000):
        joined = list(join_groups(groups, most, begin.step))
        assert sum(group.num_steps for group in joined) == 995
        for group, after in pairwise(joined):
            assert after.first_step == group.first_step + group.num_steps
            assert after.first_position == group.first_position + group.num_steps * BATCH
            assert after.num_steps <= max(most, 3)
            assert after.num_steps <= after.first_step - begin.step + 1
        assert joined[0].num_steps == 1
    assert max(group.num_steps for group in joined) > 200


def test_ranks_of_several_speeds_get_the_same_batches(ray_local, batches) -> None:
    """The third rank is a tenth as fast, and has groups of four steps of its own."""
    phases = [Phase(batches=batches, steps=STEPS, batch_size=BATCH)]
    source = descriptors(phases, Start(), max_steps=4)
    splits = split_dealt_groups(source, phases, 3, speeds=FixedSpeeds((256, 128, 25)))
    with ThreadPoolExecutor(3) as pool:
        parts = list(pool.map(_collect, splits))
    expected = _expected(batches)
    for steps in zip(*parts, strict=True):
        assert len({(number, micro_batches) for number, _, _, micro_batches in steps}) == 1
        ids = sorted(sample for _, ids, _, _ in steps for sample in ids)
        assert tuple(ids) == expected[steps[0][0]]
    tokens = [sum(sum(sums) for _, _, sums, _ in part) for part in parts]
    rows = [sum(len(ids) for _, ids, _, _ in part) for part in parts]
    assert rows[0] > 1.5 * rows[1] > 4 * rows[2] > 0
    assert tokens[0] > tokens[1] > tokens[2]


@pytest.mark.parametrize(
    ("world_size", "start"),
    [(2, 0), (3, 5), *(pytest.param(*case, marks=MATRIX) for case in ((1, 0), (5, 22), (12, 21)))],
)
def test_each_rank_gets_its_part_in_order(ray_local, batches, world_size, start) -> None:
    begin = Start(step=start, samples=start * BATCH)
    phases = [Phase(batches=batches, steps=STEPS, batch_size=BATCH)]
    iterators = split_dealt_groups(descriptors(phases, begin), phases, world_size)
    with ThreadPoolExecutor(world_size) as pool:
        parts = list(pool.map(_collect, iterators))

    expected = _expected(batches)
    numbers = list(range(start + 1, STEPS + 1))
    assert all([step[0] for step in part] == numbers for part in parts)
    for place, number in enumerate(numbers):
        ids = sorted(i for part in parts for i in part[place][1])
        assert tuple(ids) == expected[number]
        assert len({part[place][3] for part in parts}) == 1, "ranks differ in micro-batches"


@pytest.mark.parametrize("start", [7, *(pytest.param(n, marks=MATRIX) for n in (0, 4, 9))])
def test_phases_follow_on_one_another_in_one_stream(ray_local, batches, tmp_path, start) -> None:
    manifest = write_data_set(tmp_path, samples=100, seed=1)
    other = replace(
        batches,
        url=str(tmp_path),
        manifest=Manifest.read(Storage(str(tmp_path))),
        order=replace(batches.order, num_samples=manifest.samples),
    )
    phases = place_phases(
        [
            Phase(batches=batches, steps=4, batch_size=10),
            Phase(batches=other, steps=3, batch_size=7),
            Phase(batches=batches, steps=4, batch_size=20),
        ]
    )
    sizes = [10] * 4 + [7] * 3 + [20] * 4
    places = [(batches, 10 * k) for k in range(4)] + [(other, 7 * k) for k in range(3)]
    places += [(batches, 40 + 20 * k) for k in range(4)]
    begin = Start(step=start, samples=sum(sizes[:start]))
    (iterator,) = split_dealt_groups(descriptors(phases, begin), phases, 1)
    steps = list(RankStream(iterator, "uint16"))
    assert [step.step for step in steps] == list(range(start + 1, 12))
    for step in steps:
        source, position = places[step.step - 1]
        group = Group(
            first_step=0, first_position=position, num_steps=1, batch_size=sizes[step.step - 1]
        )
        (payload,) = source.payloads(group, 1)
        (expected,) = decode(payload, "uint16")
        assert step.rows.sample_ids.tolist() == expected.rows.sample_ids.tolist()


def test_nothing_is_left_after_the_last_step(ray_local, batches) -> None:
    done = Start(step=5, samples=145)
    phases = [Phase(batches=batches, steps=5, batch_size=BATCH)]
    (iterator,) = split_dealt_groups(descriptors(phases, done), phases, 1)
    assert list(RankStream(iterator, "uint16")) == []


def test_digests_add_up_over_ranks(batches) -> None:
    (group,) = batches.groups(Start(), steps=1, batch_size=BATCH, max_tokens=1)
    wholes = {
        sum(
            digest(step.rows.sample_ids)
            for payload in batches.payloads(group, world_size)
            for step in decode(payload, "uint16")
        )
        % 2**64
        for world_size in (1, 2, 3, 7, 64)
    }
    assert len(wholes) == 1


def test_micro_batches_are_views_of_the_payload(batches) -> None:
    (group,) = batches.groups(Start(), steps=1, batch_size=BATCH, max_tokens=1)
    (payload,) = batches.payloads(group, 1)
    (step,) = decode(payload, "uint16")
    memory = np.frombuffer(payload, np.uint8)
    for rows in step.micro_batches:
        assert int(rows.lengths.sum()) <= batches.tokens_per_micro_batch
        assert np.shares_memory(rows.tokens, memory)


@pytest.mark.parametrize("multiple", [1, 2])
def test_a_larger_budget_cuts_as_if_it_had_been_dealt(batches: Batches, multiple: int) -> None:
    least = replace(batches, micro_batch_multiple=multiple, tokens_per_micro_batch=48)
    open_ = replace(least, larger_budgets=(96, 192, 4096))
    group = Group(first_step=0, first_position=0, num_steps=4, batch_size=BATCH)
    for budget in (48, *open_.larger_budgets):
        dealt_so = replace(least, tokens_per_micro_batch=budget).payloads(group, 3)
        for payload, expected in zip(open_.payloads(group, 3), dealt_so, strict=True):
            steps = zip(decode(payload, "uint16"), decode(expected, "uint16"), strict=True)
            for step, same in steps:
                cut = step.cut_for([budget])
                assert cut.cuts.tolist() == same.cuts.tolist()
                assert cut.rows.sample_ids.tolist() == same.rows.sample_ids.tolist()


@pytest.mark.parametrize("multiple", [1, 2])
def test_each_kind_of_rank_cuts_by_its_budget_and_all_into_equally_many(
    batches: Batches, multiple: int
) -> None:
    """The rows of every rank are those that it would have anyway."""
    open_ = replace(
        batches,
        micro_batch_multiple=multiple,
        tokens_per_micro_batch=48,
        larger_budgets=(96, 192, 4096),
    )
    group = Group(first_step=0, first_position=0, num_steps=4, batch_size=BATCH)
    large, small = RankKind("A100"), RankKind("T4", 96)
    kinds, numbers = (small, large, large), (0, 1, 1)
    payloads = list(open_.payloads(group, 3, kinds=kinds))
    for budgets in ((48, 48), (48, 4096), (96, 192)):
        counts = set()
        for payload, plain, number in zip(payloads, open_.payloads(group, 3), numbers, strict=True):
            steps = zip(decode(payload, "uint16"), decode(plain, "uint16"), strict=True)
            for step, same in steps:
                cut = step.cut_for(budgets, number)
                assert cut.rows.sample_ids.tolist() == same.rows.sample_ids.tolist()
                assert max(len(rows.tokens) for rows in cut.micro_batches) <= budgets[number]
                counts.add((step.step, len(cut.cuts) - 1))
        assert len(counts) == group.num_steps
        assert all(count % multiple == 0 for _, count in counts)
    assert not any(4096 in step.counts[0] for step in decode(payloads[0], "uint16"))


def _turns(batches: Batches, *ranks: int, num_ranks: int = 3) -> Iterator[RankStep]:
    """Steps 1, 2... as payloads bring them, each of the rank that is named."""
    groups = batches.groups(Start(), steps=len(ranks), batch_size=BATCH, max_tokens=1)
    for rank, group in zip(ranks, groups, strict=True):
        yield from decode(list(batches.payloads(group, num_ranks))[rank], "uint16")


def _told(steps: Iterable[RankStep], *, done: int = 0, last: int = 3) -> str:
    with pytest.raises(WrongStepError) as refused:
        list(check_order(steps, 1, 3, done=done, last=last))
    return str(refused.value)


def test_a_rank_takes_its_own_steps_in_their_order(batches) -> None:
    mine = list(_turns(batches, 1, 1, 1))
    assert [step.step for step in check_order(mine, 1, 3, done=0, last=3)] == [1, 2, 3]
    assert [step.step for step in check_order(mine[1:], 1, 3, done=1, last=3)] == [2, 3]
    assert list(check_order([], 1, 3, done=3, last=3)) == []


def test_a_payload_of_another_rank_is_an_error(batches) -> None:
    told = _told(_turns(batches, 1, 2, 1))
    assert told.startswith("step 2: rank 1 of 3 got what was dealt to rank 2 of 3: Ray Data ")
    told = _told(_turns(batches, 1, 1, 1, num_ranks=2))
    assert told.startswith("step 1: rank 1 of 3 got what was dealt to rank 1 of 2: ")


@pytest.mark.parametrize(
    ("order", "done", "line"),
    [
        ((1, 0, 2), 0, "step 2: rank 1 of 3 got it after step 0, expected step 1"),
        ((0, 2), 0, "step 3: rank 1 of 3 got it after step 1, expected step 2"),
        ((0, 0, 1, 2), 0, "step 1: rank 1 of 3 got it after step 1, expected step 2"),
        ((0, 1), 0, "step 3: rank 1 of 3 got nothing after step 2 of 3"),
        ((), 1, "step 2: rank 1 of 3 got nothing after step 1 of 3"),
        ((0, 1, 2), 1, "step 1: rank 1 of 3 got it after step 1, expected step 2"),
    ],
)
def test_steps_out_of_order_or_missing_are_an_error(batches, order, done, line) -> None:
    mine = list(_turns(batches, 1, 1, 1))
    assert _told([mine[number] for number in order], done=done).startswith(line)


def test_ray_hands_every_rank_its_own_payloads(ray_local, batches) -> None:
    """The installed Ray delivers what `check_order` demands, with copies or not."""
    phases = [Phase(batches=batches, steps=STEPS, batch_size=BATCH)]
    for copies, repeats in ((1, 1), (2, 2)):
        splits = split_dealt_groups(
            descriptors(phases, Start()), phases, 4, copies=copies, repeats=repeats
        )
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda split: list(RankStream(split, "uint16")), splits))
        for rank, steps in enumerate(parts):
            own = data_rank(rank, 4, copies, repeats)
            assert list(check_order(steps, own.rank, own.dp_size, done=0, last=STEPS)) == steps
