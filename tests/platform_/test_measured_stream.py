"""The stream dealt by measured speeds, beside a training whose steps take long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

from elastrata.cluster.channel import Receiver, Sender, open_channel
from elastrata.cluster.node_speeds import STEPS_IN_A_GROUP, MeasuredSpeeds
from elastrata_pipelines.batches import Batches, Start
from elastrata_pipelines.deal import WorkModel
from elastrata_pipelines.order import Order
from elastrata_pipelines.phase import Phase
from elastrata_pipelines.stream import RankStream, descriptors, split_dealt_groups
from support.histories import record
from support.synthetic import write_data_set

STEPS, SAMPLES = 40, 300


def test_training_and_readers_do_not_wait_for_each_other(ray_local: None, tmp_path: Path) -> None:
    """Readers hear of few steps ahead, and Ray Data holds some of what they read back."""
    manifest = write_data_set(tmp_path, samples=SAMPLES)
    batches = Batches(
        url=str(tmp_path),
        manifest=manifest,
        order=Order(
            num_samples=SAMPLES, stripe_size=manifest.stripe_size, window_stripes=3, seed=7
        ),
        work=WorkModel(linear=1000, quadratic=3),
        tokens_per_micro_batch=96,
    )
    phases = [Phase(batches=batches, steps=STEPS, batch_size=29)]
    channel = open_channel()
    driver = Receiver(channel, lambda events: None)  # a sender waits for it with its next batch
    speeds = MeasuredSpeeds(channel=channel, copies=1, repeats=1)(["one node", "another"])
    source = descriptors(phases, Start(), max_steps=STEPS_IN_A_GROUP)
    splits = split_dealt_groups(source, phases, 2, speeds=speeds)
    sender = Sender(channel, rank=0)
    done: list[list[int]] = [[], []]

    def train(rank: int, split: Any) -> None:
        for step in RankStream(split, "uint16"):
            done[rank].append(step.step)
            if rank == 0:
                sender.send(replace(record(step.step), seconds=1.0))

    ranks = [Thread(target=train, args=each, daemon=True) for each in enumerate(splits)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=500)
    assert done == [list(range(1, STEPS + 1))] * 2
    sender.close()
    driver.close()
