"""Phases: every step at its place, from wherever the run continues."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.groups import BatchSizeWarmup, batch_size_at, count_samples
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import Origin, Phase, compute_positions_after, place_phases
from elastrata_pipelines.storage import Storage
from support.synthetic import write_data_set


@pytest.fixture(scope="module")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> list[Batches]:
    return [_batches(tmp_path_factory.mktemp("data"), samples) for samples in (200, 90)]


def _batches(folder: Path, samples: int) -> Batches:
    manifest = write_data_set(folder, samples=samples)
    return Batches(
        url=str(folder),
        manifest=Manifest.read(Storage(str(folder))),
        order=Order(
            num_samples=samples, stripe_size=manifest.stripe_size, window_stripes=2, seed=0
        ),
        work=WorkModel(linear=1, quadratic=1),
        tokens_per_micro_batch=96,
    )


@given(
    steps=st.integers(0, 60),
    full=st.integers(1, 40),
    start=st.integers(1, 40),
    warm=st.integers(1, 50),
    multiple=st.integers(1, 7),
)
def test_samples_are_those_of_the_steps(
    steps: int, full: int, start: int, warm: int, multiple: int
) -> None:
    warmup = BatchSizeWarmup(start=start, steps=warm, multiple=multiple) if start < full else None
    sizes = [batch_size_at(step, full=full, warmup=warmup) for step in range(steps)]
    assert count_samples(steps, full=full, warmup=warmup) == sum(sizes)


@given(
    plan=st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 9), st.integers(4, 30), st.booleans()),
        min_size=1,
        max_size=5,
    ),
    share=st.floats(0, 1),
    max_tokens=st.integers(1, 4000),
)
def test_a_run_continues_at_the_same_places_as_it_would_have_gone_on(
    data_sets: list[Batches],
    plan: list[tuple[int, int, int, bool]],
    share: float,
    max_tokens: int,
) -> None:
    phases = place_phases(
        Phase(
            batches=data_sets[which],
            steps=steps,
            batch_size=size,
            warmup=BatchSizeWarmup(start=2, steps=5) if warms else None,
        )
        for which, steps, size, warms in plan
    )
    places = _places(phases, Start(), max_tokens)
    assert [place[0] for place in places] == list(range(sum(phase.steps for phase in phases)))
    for url in {place[1] for place in places}:
        seen = [(first, size) for _, here, first, size in places if here == url]
        ends = [0, *(first + size for first, size in seen)]
        assert [first for first, _ in seen] == ends[:-1], "a gap, or something twice"
    done = round(share * len(places))
    start = Start(step=done, samples=sum(size for *_, size in places[:done]))
    assert _places(phases, start, max_tokens) == places[done:]
    forked = place_phases(phases, _origin(phases, start))
    assert _places(forked, start, max_tokens) == places[done:]
    later = (done + len(places)) // 2
    after = Start(step=later, samples=sum(size for *_, size in places[:later]))
    assert _places(forked, after, max_tokens) == places[later:]


def _origin(phases: tuple[Phase, ...], start: Start) -> Origin[str]:
    """Where a run goes on that another one with these phases has begun."""
    urls = [[phase.batches.url] for phase in phases]
    taken = compute_positions_after(start.step, [phase.size for phase in phases], urls)
    return Origin(step=start.step, samples=start.samples, positions=taken)


def test_a_fork_with_other_phases_reads_on_what_it_shares(data_sets: list[Batches]) -> None:
    """In another phase, of another batch size; of other data it begins with the first sample."""
    first, second = data_sets
    origin = Origin(step=7, samples=70, positions={first.url: 70})
    phases = place_phases(
        [
            Phase(batches=second, steps=9, batch_size=5),
            Phase(batches=first, steps=2, batch_size=20),
            Phase(batches=second, steps=1, batch_size=3),
        ],
        origin,
    )
    assert _places(phases, Start(step=7, samples=70), 1) == [
        (7, second.url, 0, 5),
        (8, second.url, 5, 5),
        (9, first.url, 70, 20),
        (10, first.url, 90, 20),
        (11, second.url, 10, 3),
    ]
    assert [place[2] for place in _places(phases, Start(step=10, samples=100), 1)] == [90, 10]


def _places(
    phases: tuple[Phase, ...], start: Start, max_tokens: int
) -> list[tuple[int, str, int, int]]:
    """Of every step its number, data set, first position and size."""
    return [
        (
            group.first_step + k,
            phase.batches.url,
            group.first_position + k * group.batch_size,
            group.batch_size,
        )
        for phase in phases
        for group in phase.groups(start, max_tokens=max_tokens)
        for k in range(group.num_steps)
    ]
