"""Groups that are made where somebody asks for them: all steps, once, in order."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastrata_pipelines.groups import BatchSizeWarmup, Groups, batch_size_at, count_samples

WARMUPS = st.none() | st.builds(
    BatchSizeWarmup,
    start=st.integers(1, 8),
    steps=st.integers(1, 60),
    multiple=st.integers(1, 3),
)


@given(
    steps=st.integers(0, 100),
    done=st.integers(0, 120),
    most=st.integers(1, 16),
    batch_size=st.integers(8, 24),
    warmup=WARMUPS,
    before=st.integers(0, 5),
)
def test_they_hold_the_steps_that_are_left_each_with_its_samples(
    steps: int, done: int, most: int, batch_size: int, warmup: BatchSizeWarmup | None, before: int
) -> None:
    def position(step: int) -> int:
        return count_samples(step, full=batch_size, warmup=warmup)

    groups = Groups(
        done=done,
        position=position(done),
        steps=steps,
        batch_size=batch_size,
        most=most,
        warmup=warmup,
        before=before,
    )
    found = [
        (group.first_step + number, group.first_position + number * group.batch_size)
        for group in groups
        for number in range(group.num_steps)
    ]
    assert found == [(before + step, position(step)) for step in range(done, steps)]
    for group in groups:
        assert 1 <= group.num_steps <= most
        for step in range(group.first_step, group.first_step + group.num_steps):
            assert group.batch_size == batch_size_at(step - before, full=batch_size, warmup=warmup)
    sizes = [group.num_steps for group in groups]
    assert sizes[:1] in ([], [1])
    if warmup is None:
        assert all(later <= 2 * size for size, later in pairwise(sizes))
    cut = len(groups) // 2
    assert [*groups[:cut], *groups[cut:]] == list(groups)
