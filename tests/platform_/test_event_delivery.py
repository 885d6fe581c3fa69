"""Events: handled once and in order, whichever buffers are lost on the way."""

from __future__ import annotations

import random

import pytest

from elastrata.cluster import event_delivery
from elastrata.cluster.event_delivery import (
    EventBuffer,
    NumberedEvent,
    SendQueue,
    handled_after,
    unhandled,
)
from elastrata.core.events import Event, Warned
from support.histories import record


class Driver:
    """What it has handled of what it took."""

    def __init__(self) -> None:
        self.handled: dict[str, int] = {}
        self.seen: list[str] = []

    def take(self, buffer: EventBuffer, *, is_answered: bool = True) -> None:
        found = buffer.unhandled(self.handled)
        if is_answered:
            new = list(unhandled(found, self.handled))
            self.seen += [text(event.event) for event in new]
            self.handled |= handled_after(new)


def text(event: Event) -> str:
    assert isinstance(event, Warned)
    return event.text


def send(sender: SendQueue, buffer: EventBuffer) -> list[str]:
    """Sends what is due; returns what was new to the buffer."""
    events, acknowledgement = buffer.put(sender.batch())
    sender.acknowledge(acknowledgement)
    return [text(event) for event in events]


def sender_of(count: int) -> SendQueue:
    sender = SendQueue("a")
    for number in range(count):
        sender.add(Warned(text=str(number)))
    return sender


def test_what_a_lost_buffer_held_is_sent_again() -> None:
    sender, driver, lost, buffer = sender_of(4), Driver(), EventBuffer(), EventBuffer()
    send(sender, lost)
    sender.add(Warned(text="4"))
    assert send(sender, buffer) == [], "the buffer lacks what came before"
    assert send(sender, buffer) == ["0", "1", "2", "3", "4"]
    driver.take(buffer)
    assert driver.seen == ["0", "1", "2", "3", "4"]


def test_what_the_driver_has_is_neither_sent_nor_handled_again() -> None:
    sender, driver, lost, buffer = sender_of(3), Driver(), EventBuffer(), EventBuffer()
    send(sender, lost)
    driver.take(lost)
    driver.take(buffer)  # the new one hears what was handled before any sender calls
    sender.add(Warned(text="3"))
    assert send(sender, buffer) == ["3"]
    driver.take(buffer)
    assert driver.seen == ["0", "1", "2", "3"]
    driver.take(buffer)
    send(sender, buffer)
    assert sender.is_handled


def test_a_take_whose_answer_is_lost_loses_nothing() -> None:
    sender, driver, buffer = sender_of(3), Driver(), EventBuffer()
    send(sender, buffer)
    driver.take(buffer, is_answered=False)
    driver.take(buffer)
    assert driver.seen == ["0", "1", "2"]


def test_a_batch_that_comes_twice_is_taken_once() -> None:
    sender, buffer = sender_of(3), EventBuffer()
    batch = sender.batch()
    assert len(buffer.put(batch)[0]) == 3
    assert buffer.put(batch)[0] == []


@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_losses_ends_with_all_in_order(seed: int) -> None:
    draw, driver, buffer = random.Random(seed), Driver(), EventBuffer()
    senders = [SendQueue(name) for name in "abc"]
    sent: dict[str, list[str]] = {name: [] for name in "abc"}
    for number in range(400):
        sender, name = draw.choice(list(zip(senders, "abc", strict=True)))
        match draw.randrange(6):
            case 0 | 1 | 2:
                sender.add(Warned(text=f"{name}{number}"))
                sent[name].append(f"{name}{number}")
            case 3:
                buffer.put(sender.batch())  # the answer is lost
            case 4:
                send(sender, buffer)
                driver.take(buffer, is_answered=draw.random() < 0.7)
            case 5:
                buffer = buffer if draw.random() < 0.7 else EventBuffer()
    for _ in range(3):
        for sender in senders:
            send(sender, buffer)
        driver.take(buffer)
    for name in "abc":
        assert [seen for seen in driver.seen if seen[0] == name] == sent[name]
    assert all(sender.is_sent for sender in senders)


def test_a_buffer_that_nobody_empties_holds_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_delivery, "MOST_IN_A_BUFFER", 5)
    sender, driver, buffer = sender_of(12), Driver(), EventBuffer()
    assert len(send(sender, buffer)) == 5
    assert send(sender, buffer) == []
    assert not sender.is_sent
    for _ in range(8):
        driver.take(buffer)
        send(sender, buffer)
    assert driver.seen == [str(number) for number in range(12)]
    assert sender.is_sent


def test_a_sender_drops_old_step_records_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_delivery, "MOST_KEPT", 4)
    sender, buffer = SendQueue("a"), EventBuffer()
    sender.add(Warned(text="first"))
    for step in range(1, 7):
        sender.add(record(step))
    sender.add(Warned(text="last"))
    events, _ = buffer.put(sender.batch())
    assert events == [Warned(text="first"), record(5), record(6), Warned(text="last")]
    assert sender.dropped == 4
    assert list(unhandled([NumberedEvent("a", 7, Warned(text="last"))], {"a": 8})) == []
