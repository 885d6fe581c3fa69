"""The mailbox: nothing that was sent is lost, whoever sends it and whenever it is taken."""

from __future__ import annotations

from threading import Thread

import pytest
import ray

from elastrata.workers.events import Refused, Warned
from elastrata.workers.mailbox import Receiver, Sender, open_mailbox


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
