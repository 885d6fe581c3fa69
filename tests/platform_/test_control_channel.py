"""The channel: nothing that was sent is lost, whoever sends it and whatever becomes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ray

from elastrata.cluster.control_channel import Receiver, open_channel
from elastrata.cluster.event_sender import Sender, tell
from elastrata.core.events import (
    Action,
    Committed,
    ControlSignal,
    Event,
    Halted,
    Heard,
    Refused,
    Warned,
)
from support.command import wait_until
from support.histories import record
from support.nodes import helpers_of, send


@contextmanager
def received(channel: Any) -> Iterator[list[Event]]:
    """The events that a receiver handles while the block runs, and afterwards."""
    events: list[Event] = []
    receiver = Receiver(channel, events.extend)
    try:
        yield events
    finally:
        receiver.close()


def test_everything_arrives_once_and_in_order(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=0)
    threads = [
        Thread(target=lambda n=n: [sender.send(Warned(text=f"{n} {k}")) for k in range(200)])
        for n in range(2)
    ]
    with received(channel) as events:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sender.close()
    texts = [event.text for event in events if isinstance(event, Warned)]
    for number in range(2):
        mine = [text for text in texts if text.startswith(f"{number} ")]
        assert mine == [f"{number} {k}" for k in range(200)]


def test_other_ranks_only_refuse(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=1)
    with received(channel) as events:
        sender.send(Warned(text="rank 0 says it, too"))
        sender.send(Refused(problems=("the shard is damaged",)))
        sender.close()
    assert events == [Refused(problems=("the shard is damaged",))]


def test_one_event_from_elsewhere(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    with received(channel) as events:
        tell(channel, Warned(text="a look at storage failed"))
        wait_until(lambda: events, 300, "the event")
    assert events == [Warned(text="a look at storage failed")]


def test_the_larger_request_counts_until_it_is_served(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=0)
    save = ControlSignal(action=Action.SAVE, reason="drain", text="a node to go")
    halt = ControlSignal(action=Action.HALT, reason="resize", text="2 -> 3 workers")

    def after(event: Event) -> ControlSignal | None:
        sender.send(event)
        sender.flush()
        return sender.look()

    assert after(Warned(text="anything")) is None
    ray.get(channel.ask.remote(save))
    committed = Committed(step=400, uri="an earlier one", evaluation_loss=None)
    assert after(committed) == save, "a checkpoint that was under way does not serve it"
    assert after(Heard(action=Action.SAVE)) is None

    ray.get([channel.ask.remote(halt), channel.ask.remote(save)])
    assert after(Warned(text="anything")) == halt
    assert after(Heard(action=Action.HALT)) == halt
    assert not ray.get(channel.has_halted.remote())
    assert after(Halted(step=5, reason="resize", text="2 -> 3 workers")) is None
    assert ray.get(channel.has_halted.remote())
    ray.get(channel.withdraw.remote(Action.HALT))
    assert not ray.get(channel.has_halted.remote())


def test_an_answer_is_seen_as_soon_as_it_is_there(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=0)
    stop = ControlSignal(action=Action.STOP, reason="stop", text="SIGTERM")
    ray.get(channel.ask.remote(stop))
    assert sender.look() is None
    sender.send(Warned(text="anything"))
    assert wait_until(sender.look, 300, "the answer to what was sent") == stop


def test_a_channel_that_is_killed_loses_nothing(ray_local_of_own_workers: None) -> None:
    before = {process.pid for process in helpers_of(os.getpid(), "ControlChannel")}
    channel = open_channel()
    sender = Sender(channel, rank=0)
    with received(channel) as events:
        sender.send(record(1))
        sender.send(Warned(text="all is well"))
        wait_until(lambda: len(events) == 2, 240, "the first events")
        (process,) = (p for p in helpers_of(os.getpid(), "ControlChannel") if p.pid not in before)
        send(process, signal.SIGKILL)
        for step in range(2, 502):
            sender.send(record(step))
        wait_until(lambda: len(events) == 502, 300, f"all events; {len(events)}")
        sender.close()
    assert events == [record(1), Warned(text="all is well"), *map(record, range(2, 502))]
