"""The speed book: what readers are told of speeds, and when."""

from __future__ import annotations

from dataclasses import replace

from elastrata.cluster.speed_book import SECONDS_AHEAD, STEPS_AHEAD, GroupKey, SpeedBook
from elastrata.core.events import Paced, Slowed, Started
from support.histories import record

EQUAL = (256, 256)
UNEQUAL = (256, 128)


def _started(book: SpeedBook, step: int) -> None:
    pids = {0: ("node-a", 1), 1: ("node-b", 2)}
    book.note(Started(attempt=1, world_size=2, step=step, state="new", pids=pids, seconds={}))


def _paced(book: SpeedBook, speeds: tuple[int, ...], paces: tuple[float, ...] = (4.0, 2.0)) -> None:
    book.note(Paced(step=9, speeds=speeds, paces=paces))


def _begun(step: int = 0) -> tuple[SpeedBook, GroupKey]:
    book, group = SpeedBook(), GroupKey(1, 2, ())
    assert book.speeds(group, step) == ()
    _started(book, step)
    return book, group


def test_readers_run_only_so_far_ahead_of_the_training() -> None:
    book, group = _begun(100)
    assert book.speeds(group, 100 + STEPS_AHEAD) == ()
    assert book.speeds(group, 101 + STEPS_AHEAD) is None
    book.note(replace(record(104), seconds=1.0))
    assert book.speeds(group, 104 + STEPS_AHEAD) == ()
    book.note(replace(record(105), seconds=0.01))
    assert book.speeds(group, 105 + round(SECONDS_AHEAD / 0.01)) == ()


def test_other_speeds_hold_for_steps_that_nobody_has_asked_about() -> None:
    book, group = _begun()
    assert book.speeds(group, 8) == ()
    _paced(book, UNEQUAL)
    assert book.speeds(group, 8) == ()
    assert book.speeds(group, 12) == UNEQUAL
    book.note(replace(record(20), seconds=1.0))
    _paced(book, EQUAL)
    assert book.speeds(group, 28) == EQUAL
    assert [book.speeds(group, step) for step in (0, 8, 11, 12, 27, 28)] == [
        (), (), (), UNEQUAL, UNEQUAL, EQUAL,
    ]  # fmt: skip


def test_speeds_of_another_number_of_ranks_are_not_taken() -> None:
    book, group = _begun()
    _paced(book, (256, 128, 64))
    assert book.speeds(group, 8) == ()


def test_a_group_of_before_gets_what_it_began_with_and_does_not_wait() -> None:
    book, _ = _begun()
    later = GroupKey(2, 2, UNEQUAL)
    assert book.speeds(later, 40) == UNEQUAL
    assert book.speeds(GroupKey(1, 2, ()), 10_000) == ()
    assert book.speeds(later, 41 + STEPS_AHEAD) is None


def test_a_new_book_goes_on_in_the_middle_of_a_run() -> None:
    book, group = SpeedBook(), GroupKey(1, 2, UNEQUAL)
    assert book.speeds(group, 512) == UNEQUAL
    assert book.speeds(group, 504) == UNEQUAL
    book.note(replace(record(511), seconds=1.0))
    _paced(book, EQUAL)
    assert book.speeds(group, 520) == EQUAL


def test_the_next_group_begins_with_the_paces_of_its_nodes() -> None:
    book, _ = _begun()
    _paced(book, UNEQUAL, paces=(4.0, 0.0))
    assert book.paces() == {"node-a": 4.0}
    _paced(book, UNEQUAL, paces=(5.0, 2.0))
    assert book.paces() == {"node-a": 5.0, "node-b": 2.0}


def test_slow_nodes_are_known_until_they_are_fast_or_train_again() -> None:
    book, _ = _begun()
    slowed = {"step": 9, "rank": 1, "node": "node-b", "host": "b", "device": "CPU", "since": 3}
    book.note(Slowed(factor=0.4, **slowed))
    assert book.slow_nodes() == {"node-b": 0.4}
    book.note(Slowed(factor=0.95, is_over=True, **slowed))
    assert book.slow_nodes() == {"node-b": 1.0}
    book.note(Slowed(factor=0.4, **slowed))
    _started(book, 20)
    assert book.slow_nodes() == {}
