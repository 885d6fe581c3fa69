"""A process that writes files into the hot tier, as a Ray actor; without torch."""

from __future__ import annotations

from elastrata.checkpoints.replicas import replicas as storage_module
from elastrata.checkpoints.replicas.replicas import Replicas

SECONDS = 500.0
"""The limit of every answer: on a busy machine a process that is alive may take long."""


def wait_long_for_answers() -> None:
    """Let this process wait for every answer that can come."""
    storage_module._ANSWER_SECONDS = SECONDS
    storage_module._CHUNK_SECONDS = SECONDS


class Writer:
    """Writes and reads on the node it runs on."""

    def __init__(self) -> None:
        wait_long_for_answers()

    def write(self, storage: Replicas, data: bytes, *parts: str) -> None:
        storage.write(data, *parts)

    def read(self, storage: Replicas, *parts: str) -> bytes:
        return storage.read(*parts)
