"""The mailbox: nothing that was sent is lost, whoever sends it and whenever it is taken."""

from __future__ import annotations

from threading import Thread

import pytest
import ray

from elastrata.training.request import Act, Request
from elastrata.workers.events import Committed, Halted, Heard, Refused, Warned
from elastrata.workers.mailbox import Receiver, Sender, open_mailbox
from support.command import wait_until


@pytest.fixture
def received(ray_local: None) -> list[str]:
    """The texts that a receiver has handled, after two threads sent 200 warnings each."""
    mailbox = open_mailbox()
    sender = Sender(mailbox, rank=0)
    texts: list[str] = []
    receiver = Receiver(mailbox, lambda events: texts.extend(event.text for event in events))
    threads = [
        Thread(target=lambda n=n: [sender.send(Warned(text=f"{n} {k}")) for k in range(200)])
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender.flush()
    receiver.close()
    return texts


def test_everything_arrives_once_and_in_order(received: list[str]) -> None:
    for number in range(2):
        mine = [text for text in received if text.startswith(f"{number} ")]
        assert mine == [f"{number} {k}" for k in range(200)]


def test_what_waits_is_taken_at_once(ray_local: None) -> None:
    mailbox = open_mailbox()
    ray.get(mailbox.post.remote([Warned(text="last")]))
    assert ray.get(mailbox.take.remote(0)) == [Warned(text="last")]
    assert ray.get(mailbox.take.remote(0)) == []


def test_other_ranks_only_refuse(ray_local: None) -> None:
    mailbox = open_mailbox()
    sender = Sender(mailbox, rank=1)
    sender.send(Warned(text="rank 0 says it, too"))
    sender.send(Refused(problems=("the shard is damaged",)))
    sender.flush()
    assert ray.get(mailbox.take.remote(1)) == [Refused(problems=("the shard is damaged",))]


def test_the_larger_request_counts_until_it_is_served(ray_local: None) -> None:
    mailbox = open_mailbox()
    sender = Sender(mailbox, rank=0)
    save = Request(act=Act.SAVE, reason="drain", text="a node to go")
    halt = Request(act=Act.HALT, reason="resize", text="2 -> 3 workers")

    def asked() -> Request | None:
        sender.flush()
        return sender.look()

    assert asked() is None
    ray.get(mailbox.ask.remote(save))
    assert asked() == save
    sender.send(Committed(step=400, uri="an earlier one", evaluation_loss=None))
    assert asked() == save, "a checkpoint that was under way does not serve it"
    sender.send(Heard(act=Act.SAVE))
    assert asked() is None

    ray.get([mailbox.ask.remote(halt), mailbox.ask.remote(save)])
    assert asked() == halt
    sender.send(Heard(act=Act.HALT))
    assert asked() == halt
    assert not ray.get(mailbox.has_halted.remote())
    sender.send(Halted(step=5, reason="resize", text="2 -> 3 workers"))
    assert asked() is None
    assert ray.get(mailbox.has_halted.remote())
    ray.get(mailbox.withdraw.remote(Act.HALT))
    assert not ray.get(mailbox.has_halted.remote())


def test_an_answer_is_seen_as_soon_as_it_is_there(ray_local: None) -> None:
    mailbox = open_mailbox()
    sender = Sender(mailbox, rank=0)
    stop = Request(act=Act.STOP, reason="stop", text="SIGTERM")
    ray.get(mailbox.ask.remote(stop))
    assert sender.look() is None
    sender.send(Warned(text="anything"))
    assert wait_until(sender.look, 30, "the answer to what was sent") == stop
