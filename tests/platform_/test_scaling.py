"""Scaling: no group changes its size before its state is safe, a run asks the autoscaler for as
much as it can ever have and no more for long, and each worker is placed on the right node."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.train.v2.api.config import ScalingConfig

from elastrata.cluster.ray_train_internals import ResizeDecision
from elastrata.cluster.scaling_machine import (
    SECONDS_BETWEEN_LOOKS,
    SECONDS_TO_JUDGE,
    CapacityObserved,
    Demand,
    DemandObserved,
    GroupRuns,
    HaltObserved,
    Instruction,
    NodesObserved,
    NoGroup,
    Observation,
    Observe,
    Pause,
    Resize,
    ScalingEvent,
    ScalingMachine,
    Signal,
    SizeProposed,
    StartGroup,
    Withdraw,
    count_split_groups,
    place_workers,
    sort_by_speed,
    split_groups_warning,
)
from elastrata.cluster.scaling_policy import GracefulScalingPolicy
from elastrata.step.events import Action, ControlSignal

GRACE, RETRY = 60.0, 60.0
TO_GO = ControlSignal(action=Action.HALT, reason="drain", text="1 node to go")
SAVE_FIRST = ControlSignal(action=Action.SAVE, reason="drain", text="1 node to go")


def machine(least: int = 1, multiple: int = 1, retry: float = RETRY) -> ScalingMachine:
    return ScalingMachine(least=least, multiple=multiple, grace_seconds=GRACE, retry_seconds=retry)


def halt_for(text: str) -> ControlSignal:
    return ControlSignal(action=Action.HALT, reason="resize", text=text)


@dataclass
class Cluster:
    """Answers every look with what is there; the clock stands until a test moves it."""

    machine: ScalingMachine
    workers: int = 2
    proposed: int = 2
    free: int = 8
    room: int = 8
    leaving: frozenset[str] = frozenset()
    has_halted: bool = False
    now: float = 0.0
    looks: list[Observe] = field(default_factory=list)

    def tick(
        self, event: ScalingEvent, seconds: float = SECONDS_BETWEEN_LOOKS
    ) -> list[Instruction]:
        """What is done about an event, beside looks, after so many seconds."""
        self.now += seconds
        self.looks = []
        return self._done(event)

    def runs(self, seconds: float = 1.5 * SECONDS_BETWEEN_LOOKS) -> list[Instruction]:
        return self.tick(GroupRuns(), seconds)

    def _done(self, event: ScalingEvent) -> list[Instruction]:
        done: list[Instruction] = []
        for instruction in self.machine.handle(event, self.now):
            if isinstance(instruction, Observe):
                self.looks.append(instruction)
                seen = self._seen(instruction)
                done += self._done(seen) if seen else []
            else:
                done.append(instruction)
        return done

    def _seen(self, look: Observe) -> Observation | None:
        match look:
            case Observe.NODES:
                return NodesObserved(self.leaving)
            case Observe.SIZE if self.proposed != self.workers:
                return SizeProposed(self.workers, self.proposed, self.free)
            case Observe.ROOM:
                return CapacityObserved(self.room)
            case Observe.HALT:
                return HaltObserved(self.has_halted)
        return None


def test_a_group_grows_when_its_state_is_safe() -> None:
    cluster = Cluster(machine())
    assert cluster.runs() == []
    cluster.proposed = 4
    assert cluster.runs() == [Signal(halt_for("2 -> 4 workers"))]
    cluster.proposed = 2
    assert cluster.runs() == [Signal(halt_for("2 -> 4 workers"))], "who was asked may have died"
    cluster.has_halted, cluster.room = True, 3
    assert cluster.runs() == [Withdraw(), Resize(3)], "for as many as there is room for by now"
    cluster.workers, cluster.proposed, cluster.has_halted = 3, 3, False
    assert cluster.runs() == []


@pytest.mark.parametrize(
    ("multiple", "proposed", "free", "asked"),
    [(1, 4, 8, "2 -> 4 workers"), (1, 4, 1, "2 -> 3 workers"), (2, 5, 8, "2 -> 4 workers")],
)
def test_as_many_as_fit_in_whole_groups(
    multiple: int, proposed: int, free: int, asked: str
) -> None:
    cluster = Cluster(machine(multiple=multiple), proposed=proposed, free=free)
    assert cluster.runs() == [Signal(halt_for(asked))]


def test_without_room_elsewhere_the_state_is_saved_once_for_each_node() -> None:
    cluster = Cluster(machine(least=2), leaving=frozenset("a"), room=1)
    assert cluster.runs() == [Signal(SAVE_FIRST)]
    assert cluster.runs() == []
    assert cluster.runs(0.1) == []
    assert Observe.ROOM not in cluster.looks, "the whole cluster is looked at once a second"
    cluster.leaving = frozenset("ab")
    (saved,) = cluster.runs()
    assert isinstance(saved, Signal)
    assert saved.signal.text == "2 nodes to go"
    cluster.room = 2
    (halted,) = cluster.runs()
    assert isinstance(halted, Signal)
    assert halted.signal.action == Action.HALT


def test_without_a_group_nothing_is_asked_and_one_is_started_once_a_second() -> None:
    cluster = Cluster(machine(), proposed=3)
    cluster.runs()
    assert cluster.tick(NoGroup()) == [Withdraw(), StartGroup()], "who was asked is gone"
    assert cluster.looks == [Observe.CLUSTER, Observe.DEMAND]
    assert cluster.tick(NoGroup(), 0.1) == [Pause(0.1)]
    assert cluster.looks == []
    assert cluster.tick(NoGroup()) == [StartGroup()]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=50))
def test_no_group_is_resized_before_it_halts(history: list[tuple[int, int, bool]]) -> None:
    cluster = Cluster(machine(least=2, multiple=2))
    for proposed, room, has_halted in history:
        cluster.proposed, cluster.room, cluster.has_halted = proposed, room - room % 2, has_halted
        for done in cluster.runs(0.01):
            if isinstance(done, Resize):
                assert cluster.has_halted
                assert done.workers >= 2
                cluster.workers = done.workers


class Run:
    """What a run asks the autoscaler for."""

    def __init__(self, least: int = 1, retry: float = RETRY) -> None:
        self._machine = machine(least=least, retry=retry)
        self.demanded = 0

    def demand(self, most: int, *, have: int, is_refused: bool, now: float) -> int:
        """The workers it asks for now."""
        for done in self._machine.handle(DemandObserved(most, have, is_refused), now):
            assert isinstance(done, Demand)
            self.demanded = done.workers
        return self.demanded


class Autoscaler:
    """All or nothing, as Ray's: it launches what is asked for in all, or nothing at all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.is_refusing = False

    def launch(self, asked: list[int], have: list[int]) -> list[int]:
        self.is_refusing = sum(asked) > self.limit
        return have if self.is_refusing else [max(pair) for pair in zip(asked, have, strict=True)]


def _rounds(autoscaler: Autoscaler, wanted: list[int], rounds: int) -> list[int]:
    runs = [Run(retry=RETRY + 37 * number) for number, _ in enumerate(wanted)]
    have = [0] * len(wanted)
    for number in range(rounds):
        now = number * SECONDS_TO_JUDGE
        asked = [
            run.demand(most, have=there, is_refused=autoscaler.is_refusing, now=now)
            for run, most, there in zip(runs, wanted, have, strict=True)
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
    run = Run(least=4)
    assert run.demand(16, have=0, is_refused=False, now=0.0) == 16
    assert run.demand(16, have=0, is_refused=True, now=12.0) == 8
    assert run.demand(16, have=0, is_refused=True, now=24.0) == 4
    assert run.demand(16, have=0, is_refused=True, now=36.0) == 0
    assert run.demand(16, have=0, is_refused=False, now=48.0) == 0
    assert run.demand(16, have=0, is_refused=False, now=36.0 + RETRY) == 16


ROOMS = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1)


@given(ROOMS, st.integers(1, 4), st.integers(1, 16))
def test_no_node_has_more_than_its_room_and_whole_groups_stay_whole(
    rooms: dict[str, int], tensor: int, groups: int
) -> None:
    workers = groups * tensor
    placed = place_workers(rooms, workers, tensor)
    assert (placed is None) == (sum(rooms.values()) < workers)
    if placed is None:
        return
    assert len(placed) == workers
    assert all(placed.count(node) <= room for node, room in rooms.items())
    changes = sum(one != other for one, other in pairwise(placed))
    assert changes == len(set(placed)) - 1  # ranks go node by node
    whole = sum(room // tensor for room in rooms.values())
    if whole >= groups:
        assert count_split_groups(placed, tensor) == 0


def test_a_group_is_split_only_where_no_node_has_room() -> None:
    assert place_workers({"a": 3, "b": 4}, 4, 2) == ["a", "a", "b", "b"]
    assert place_workers({"a": 3, "b": 3}, 6, 2) == ["a", "a", "a", "b", "b", "b"]
    assert place_workers({"a": 3, "b": 4, "c": 1}, 8, 2) == [*"bbbb", *"aaa", "c"]
    assert place_workers({"a": 1}, 2, 2) is None
    assert split_groups_warning([*"bbbb", *"aaa", "c"], 2).startswith(
        "parallel.tensor: 2: 1 of 4 groups have"
    )
    assert split_groups_warning([*"aabb"], 2) == ""


def test_nodes_of_one_kind_follow_each_other() -> None:
    rooms, peaks = {"a": 4, "b": 8, "c": 4, "d": 8}, {"a": 312.0, "c": 312.0, "b": 65.0, "d": 65.0}
    assert list(sort_by_speed(rooms, peaks, fastest_first=True)) == ["a", "c", "b", "d"]
    assert list(sort_by_speed(rooms, peaks, fastest_first=False)) == ["b", "d", "a", "c"]


def policy(cpus: float = 1.0, *, multiple: int = 1, tensor: int = 1) -> GracefulScalingPolicy:
    scaling = ScalingConfig(num_workers=(1, 8), resources_per_worker={"CPU": cpus})
    return GracefulScalingPolicy(
        scaling, None, run="run", multiple=multiple, grace_seconds=1, tensor=tensor
    )


@pytest.mark.parametrize(
    ("multiple", "cpus", "expected"),
    [(1, (3, 3), 6), (1, (9,), 8), (4, (3, 3), 4), (4, (3,), 0), (1, (2.5, 0.5), 2)],
)
def test_workers_come_in_multiples_the_rest_wait(multiple, cpus, expected) -> None:
    reserved = {str(node): {"CPU": float(count)} for node, count in enumerate(cpus)}
    assert policy(multiple=multiple).count_possible(reserved) == expected


def test_three_times_four_tenths_fit_into_one_and_two_tenths() -> None:
    assert policy(0.4).count_possible({"a": {"CPU": 0.4 + 0.4 + 0.4}}) == 3


@pytest.mark.parametrize(
    ("cpus", "expected"), [((3, 3), 4), ((1, 1), 2), ((4, 3, 3), 8), ((9, 1), 8)]
)
def test_a_worker_that_would_split_a_group_waits_where_the_run_has_enough(cpus, expected) -> None:
    reserved = {str(node): {"CPU": float(count)} for node, count in enumerate(cpus)}
    assert policy(multiple=2, tensor=2).count_possible(reserved) == expected


def test_a_group_that_did_not_start_is_placed_by_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has a label selector of its own, in the order of ranks."""
    ours, run = policy(multiple=2, tensor=2), ScalingConfig(num_workers=(1, 8))
    reserved = {"a": {"CPU": 3.0}, "b": {"CPU": 4.0}}
    monkeypatch.setattr(ours, "_reserved_resources", lambda: reserved)
    monkeypatch.setattr(ours, "_scaling_of_run", run)
    by_node = [{"ray.io/node-id": node} for node in "bbbbaa"]
    for expected in (by_node, None, by_node):
        ours.before_controller_execute_resize_decision(ResizeDecision(6, {"CPU": 1.0}))
        assert run.label_selector == expected
