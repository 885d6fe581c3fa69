"""Letters: handled once and in order, whichever shelves are lost on the way."""

from __future__ import annotations

import random

import pytest

from elastrata.cluster import letters
from elastrata.cluster.letters import Letter, Outgoing, Shelf, handled_after, unhandled
from elastrata.core.events import Event, Warned
from support.histories import record


class Driver:
    """What it has handled of what it took."""

    def __init__(self) -> None:
        self.handled: dict[str, int] = {}
        self.seen: list[str] = []

    def take(self, shelf: Shelf, *, is_answered: bool = True) -> None:
        found = shelf.unhandled(self.handled)
        if is_answered:
            new = list(unhandled(found, self.handled))
            self.seen += [text(letter.event) for letter in new]
            self.handled |= handled_after(new)


def text(event: Event) -> str:
    assert isinstance(event, Warned)
    return event.text


def post(sender: Outgoing, shelf: Shelf) -> list[str]:
    """Sends what is due; returns what was new to the shelf."""
    events, receipt = shelf.put(sender.parcel())
    sender.settle(receipt)
    return [text(event) for event in events]


def sender_of(count: int) -> Outgoing:
    sender = Outgoing("a")
    for number in range(count):
        sender.add(Warned(text=str(number)))
    return sender


def test_what_a_lost_shelf_held_is_sent_again() -> None:
    sender, driver, lost, shelf = sender_of(4), Driver(), Shelf(), Shelf()
    post(sender, lost)
    sender.add(Warned(text="4"))
    assert post(sender, shelf) == [], "the shelf lacks what came before"
    assert post(sender, shelf) == ["0", "1", "2", "3", "4"]
    driver.take(shelf)
    assert driver.seen == ["0", "1", "2", "3", "4"]


def test_what_the_driver_has_is_neither_sent_nor_handled_again() -> None:
    sender, driver, lost, shelf = sender_of(3), Driver(), Shelf(), Shelf()
    post(sender, lost)
    driver.take(lost)
    driver.take(shelf)  # the new one hears what was handled before any sender calls
    sender.add(Warned(text="3"))
    assert post(sender, shelf) == ["3"]
    driver.take(shelf)
    assert driver.seen == ["0", "1", "2", "3"]
    driver.take(shelf)
    post(sender, shelf)
    assert sender.is_handled


def test_a_take_whose_answer_is_lost_loses_nothing() -> None:
    sender, driver, shelf = sender_of(3), Driver(), Shelf()
    post(sender, shelf)
    driver.take(shelf, is_answered=False)
    driver.take(shelf)
    assert driver.seen == ["0", "1", "2"]


def test_a_parcel_that_comes_twice_is_taken_once() -> None:
    sender, shelf = sender_of(3), Shelf()
    parcel = sender.parcel()
    assert len(shelf.put(parcel)[0]) == 3
    assert shelf.put(parcel)[0] == []


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_losses_ends_with_all_in_order(seed: int) -> None:
    draw, driver, shelf = random.Random(seed), Driver(), Shelf()
    senders = [Outgoing(name) for name in "abc"]
    sent: dict[str, list[str]] = {name: [] for name in "abc"}
    for number in range(400):
        sender, name = draw.choice(list(zip(senders, "abc", strict=True)))
        match draw.randrange(6):
            case 0 | 1 | 2:
                sender.add(Warned(text=f"{name}{number}"))
                sent[name].append(f"{name}{number}")
            case 3:
                shelf.put(sender.parcel())  # the answer is lost
            case 4:
                post(sender, shelf)
                driver.take(shelf, is_answered=draw.random() < 0.7)
            case 5:
                shelf = shelf if draw.random() < 0.7 else Shelf()
    for _ in range(3):
        for sender in senders:
            post(sender, shelf)
        driver.take(shelf)
    for name in "abc":
        assert [seen for seen in driver.seen if seen[0] == name] == sent[name]
    assert all(sender.is_sent for sender in senders)


def test_a_shelf_that_nobody_empties_holds_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MOST_ON_THE_SHELF", 5)
    sender, driver, shelf = sender_of(12), Driver(), Shelf()
    assert len(post(sender, shelf)) == 5
    assert post(sender, shelf) == []
    assert not sender.is_sent
    for _ in range(8):
        driver.take(shelf)
        post(sender, shelf)
    assert driver.seen == [str(number) for number in range(12)]
    assert sender.is_sent


def test_a_sender_drops_old_step_records_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MOST_KEPT", 4)
    sender, shelf = Outgoing("a"), Shelf()
    sender.add(Warned(text="first"))
    for step in range(1, 7):
        sender.add(record(step))
    sender.add(Warned(text="last"))
    events, _ = shelf.put(sender.parcel())
    assert events == [Warned(text="first"), record(5), record(6), Warned(text="last")]
    assert sender.dropped == 4
    assert list(unhandled([Letter("a", 7, Warned(text="last"))], {"a": 8})) == []
