"""The channel: nothing that was sent is lost, no matter who sends it and what becomes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ray

from elastrata.cluster.channel import Receiver, Sender, open_channel, send_event
from elastrata.step.events import (
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


def test_everything_arrives_in_order(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=0)
    threads = [
        Thread(target=lambda n=n: [sender.send(Warned(text=f"{n} {k}")) for k in range(200)])
        for n in range(2)
    ]
    with received(channel) as events:
        send_event(channel, Warned(text="from elsewhere"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sender.close()
        wait_until(lambda: Warned(text="from elsewhere") in events, 300, "an event from elsewhere")
    # a batch may come again if an answer is lost
    texts = dict.fromkeys(event.text for event in events if isinstance(event, Warned))
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
    assert events, "at least once"
    assert all(event == Refused(problems=("the shard is damaged",)) for event in events)


def test_the_larger_request_counts_until_it_is_served(ray_local_of_own_workers: None) -> None:
    channel = open_channel()
    sender = Sender(channel, rank=0)
    save = ControlSignal(action=Action.SAVE, reason="drain", text="a node to go")
    halt = ControlSignal(action=Action.HALT, reason="resize", text="2 -> 3 workers")

    def after(event: Event) -> ControlSignal | None:
        sender.send(event)
        sender.flush()
        return sender.look()

    with received(channel):
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


def test_a_channel_that_is_killed_loses_nothing(ray_local_of_own_workers: None) -> None:
    before = {process.pid for process in helpers_of(os.getpid(), "ControlChannel")}
    channel = open_channel()
    sender = Sender(channel, rank=0)
    with received(channel) as events:
        sender.send(record(1))
        sender.send(Warned(text="all is well"))
        wait_until(lambda: len(events) >= 2, 240, "the first events")
        (process,) = (p for p in helpers_of(os.getpid(), "ControlChannel") if p.pid not in before)
        send(process, signal.SIGKILL)
        for step in range(2, 502):
            sender.send(record(step))
        wait_until(lambda: record(501) in events, 300, f"all events; {len(events)}")
        sender.close()
    sent = [record(1), Warned(text="all is well"), *map(record, range(2, 502))]
    # in order, and at least once: a batch that was on its way may come again
    assert list(dict.fromkeys(map(repr, events))) == list(map(repr, sent))
