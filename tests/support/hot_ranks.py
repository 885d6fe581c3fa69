"""Processes that use the hot tier, as Ray actors: writers of files, and ranks of a training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from elastrata.checkpoints.commit import Commit
from elastrata.checkpoints.replicas.replicas import Replicas
from elastrata.checkpoints.save import replica_saver
from elastrata.checkpoints.state import restore
from support.checkpoint_ranks import ROWS, Training
from support.hot_writer import wait_long_for_answers


class Rank:
    """One rank of a small FSDP2 training that copies its state into the hot tier."""

    def __init__(self, rank: int, world_size: int, rendezvous: str) -> None:
        torch.set_num_threads(1)
        wait_long_for_answers()
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        self._training = Training()
        self._warnings: list[str] = []

    def begin(self, storage: Replicas, attempt: int) -> None:
        self._saver = replica_saver(storage, attempt=attempt, warn=self._warnings.append)

    def save(self, step: int) -> dict[str, Tensor]:
        """Trains a step, saves it, and returns the whole state of that moment."""
        self._training.step(step)
        assert self._saver.all_idle()
        tokens = step * ROWS
        self._saver.save(self._training.state(), step=step, samples=tokens, tokens=tokens)
        self._saver.wait()
        return self._training.full()

    def warnings(self) -> list[str]:
        """What the saver has warned of since the last call."""
        found, self._warnings[:] = list(self._warnings), []
        return found

    def end(self) -> None:
        self._saver.close()

    def restore(self, storage: Replicas, commit: Commit) -> dict[str, Tensor]:
        restore(storage, commit, self._training.model, self._training.optimizer)
        return self._training.full()


class DeadlyHotStorage(Replicas):
    """Kills its process when the first bytes of a file are on their way."""

    def __reduce__(self) -> tuple[type[Replicas], tuple[Any]]:
        return DeadlyHotStorage, (self.registry,)

    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        with super().create(*parts) as stream:
            stream.write(bytes(40 * 2**20))
            os.kill(os.getpid(), signal.SIGKILL)
            yield stream
