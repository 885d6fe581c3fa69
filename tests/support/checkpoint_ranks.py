"""One rank of a small FSDP2 training, for the tests of checkpoints.

Every scenario gets the arguments of its test, and rank 0 leaves tensors behind.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastrata.checkpoints.commit import EVALUATION_LOSS, find_newest_verified
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import restore, training_state
from elastrata_pipelines.storage import Storage

ROWS = 6
VOCABULARY, WIDTH = 11, 5


class Tiny(nn.Module):
    """Tied embedding and head, sizes that no world size divides, and a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.embedding(ids))))
        return logits


class Training:
    """A sharded model with AdamW, the same at any world size up to the order of its sums."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = Tiny()
        fully_shard(self.model.hidden)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, seed: int) -> None:
        mine = self.ids(seed)
        nn.functional.cross_entropy(self.model(mine), mine).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def ids(self, seed: int) -> Tensor:
        """This rank's part of a batch."""
        ids = torch.randint(VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(seed))
        return ids.chunk(dist.get_world_size())[dist.get_rank()]

    def state(self) -> dict[str, Any]:
        return training_state(self.model, self.optimizer)

    def full(self) -> dict[str, Tensor]:
        """Copies of all tensors of the state, whole. Collective."""
        return {
            f"{part}.{name}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for part, tensors in self.state().items()
            for name, value in tensors.items()
        }


def saver(storage: Storage, arguments: dict[str, Any]) -> DurableSaver:
    return DurableSaver(
        storage,
        keep_last=2,
        keep_best=True,
        warn=lambda line: note(arguments, {"warning": line}),
        on_commit=lambda commit: note(arguments, {"commit": commit.step}),
        on_remove=lambda commit: note(arguments, {"removed": commit.step}),
    )


def note(arguments: dict[str, Any], entry: dict[str, Any]) -> None:
    with Path(arguments["notes"]).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(entry) + "\n")


def leave(arguments: dict[str, Any], **tensors: dict[str, Tensor]) -> None:
    if dist.get_rank() == 0:
        torch.save(tensors, arguments["result"])


def save(saving: DurableSaver, training: Training, step: int, **extra: float) -> float:
    return saving.save(
        training.state(), step=step, samples=step * ROWS, tokens=step * ROWS, extra=extra
    )


def scenario_save(arguments: dict[str, Any]) -> None:
    """Saves the untrained state and three steps, the first of them the best, and makes a fifth."""
    training = Training()
    saving = saver(Storage(arguments["storage"]), arguments)
    losses = {0: 9.0, 1: 1.0, 2: 3.0, 3: 2.0}
    for step, loss in losses.items():
        if step:
            training.step(step)
        save(saving, training, step, **{EVALUATION_LOSS: loss})
        saving.wait()
    saved = training.full()
    saving.close()
    training.step(4)
    leave(arguments, saved=saved, after=training.full())


def scenario_load(arguments: dict[str, Any]) -> None:
    training = Training()
    storage = Storage(arguments["storage"])
    commit = find_newest_verified(storage, lambda line: note(arguments, {"warning": line}))
    assert commit is not None
    restore(storage, commit, training.model, training.optimizer)
    saved = training.full()
    training.step(4)
    leave(arguments, saved=saved, after=training.full())


@dataclass(frozen=True)
class GatedStorage(Storage):
    """Holds every writer of shards back until `gate` is open."""

    gate: threading.Event

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        assert self.gate.wait(500)
        with super().create(*parts) as stream:
            yield stream


def scenario_overlap(arguments: dict[str, Any]) -> None:
    """Trains on, with its collectives, while a save that began earlier is held back."""
    gate = threading.Event()
    training = Training()
    saving = saver(GatedStorage(arguments["storage"], gate), arguments)
    training.step(1)
    at_save = training.full()
    save(saving, training, 1)
    for step in range(2, 7):
        training.step(step)
    gate.set()
    saving.close()
    leave(arguments, saved=at_save, after=training.full())


@dataclass(frozen=True)
class DeadlyStorage(Storage):
    """Kills its process when the first bytes of a file are in the operating system's hands."""

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        with super().create(*parts) as stream:
            stream.write(b"half a file")
            stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)
            yield stream


def scenario_kill(arguments: dict[str, Any]) -> None:
    """Commits step 1; in the save of step 2 rank 1 dies while it writes."""
    training = Training()
    training.step(1)
    first = saver(Storage(arguments["storage"]), arguments)
    save(first, training, 1)
    first.close()
    training.step(2)
    dying = DeadlyStorage if dist.get_rank() == 1 else Storage
    second = saver(dying(arguments["storage"]), arguments)
    save(second, training, 2)
    second.wait()
    # Without its peer no clean shutdown of the process groups is possible.
    os._exit(0)


def scenario_full_disk(arguments: dict[str, Any]) -> None:
    """No file may grow beyond a limit during the save of step 2; then all is well again."""
    training = Training()
    saving = saver(Storage(arguments["storage"]), arguments)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step in (1, 2, 3):
        training.step(step)
        saving.wait()
        soft = 1000 if step == 2 and dist.get_rank() == 1 else unlimited[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, unlimited[1]))
        save(saving, training, step)
        saving.wait()
    saving.close()


def run_scenario(name: str, arguments: dict[str, Any]) -> None:
    """Runs one to its end, and ends the process."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments['rendezvous']}",
        rank=arguments["rank"],
        world_size=arguments["world_size"],
    )
    globals()[f"scenario_{name}"](arguments)
    dist.barrier()
    dist.destroy_process_group()
    # gloo's threads may meet a peer that has gone while this process tears down, and abort it.
    os._exit(0)
