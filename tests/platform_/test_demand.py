"""What a run asks the autoscaler for: as much as it can ever have, and no more for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastrata.cluster.demand import SECONDS_TO_JUDGE, Demand

PATIENCE = 60.0


class Autoscaler:
    """All or nothing, as Ray's: it launches what is asked for in all, or nothing at all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_refusing = False

    def launch(self, asked: list[int], have: list[int]) -> list[int]:
        self.is_refusing = sum(asked) > self.limit
        return have if self.is_refusing else [max(pair) for pair in zip(asked, have, strict=True)]


def _rounds(autoscaler: Autoscaler, wanted: list[int], rounds: int) -> list[int]:
    demands = [Demand(least=1, patience=PATIENCE + 37 * number) for number, _ in enumerate(wanted)]
    have = [0] * len(wanted)
    for number in range(rounds):
        now = number * SECONDS_TO_JUDGE
        asked = [
            demand.workers(most, have=there, is_refused=autoscaler.is_refusing, now=now)
            for demand, most, there in zip(demands, wanted, have, strict=True)
        ]
        have = autoscaler.launch(asked, have)
    return have


@given(limit=st.integers(1, 2000), wanted=st.integers(1, 2000))
def test_a_run_gets_what_there_can_be(limit: int, wanted: int) -> None:
    assert _rounds(Autoscaler(limit), [wanted], rounds=150) == [min(limit, wanted)]


@given(limit=st.integers(1, 64), wanted=st.lists(st.integers(1, 64), min_size=2, max_size=4))
def test_several_runs_never_have_more_together_and_never_nothing(
    limit: int, wanted: list[int]
) -> None:
    have = _rounds(Autoscaler(limit), wanted, rounds=200)
    assert sum(have) <= limit
    assert sum(have) > 0


def test_a_run_that_cannot_have_the_least_it_needs_makes_way() -> None:
    demand = Demand(least=4, patience=PATIENCE)
    assert demand.workers(16, have=0, is_refused=False, now=0.0) == 16
    assert demand.workers(16, have=0, is_refused=True, now=12.0) == 8
    assert demand.workers(16, have=0, is_refused=True, now=24.0) == 4
    assert demand.workers(16, have=0, is_refused=True, now=36.0) == 0
    assert demand.workers(16, have=0, is_refused=False, now=48.0) == 0
    assert demand.workers(16, have=0, is_refused=False, now=36.0 + PATIENCE) == 16


def test_a_larger_cluster_is_found_out_after_a_while() -> None:
    demand = Demand(least=1, patience=PATIENCE)
    assert demand.workers(8, have=4, is_refused=False, now=0.0) == 8
    assert demand.workers(8, have=4, is_refused=True, now=1.0) == 8  # too soon to say
    assert demand.workers(8, have=4, is_refused=True, now=SECONDS_TO_JUDGE) == 6
    assert demand.workers(8, have=6, is_refused=False, now=SECONDS_TO_JUDGE + 1) == 7
    late = SECONDS_TO_JUDGE + PATIENCE
    assert demand.workers(8, have=6, is_refused=False, now=late) == 8


def test_what_it_has_is_never_given_up() -> None:
    demand = Demand(least=1, patience=PATIENCE)
    for now in (0.0, 20.0, 40.0):
        assert demand.workers(6, have=6, is_refused=True, now=now) == 6
