"""A process that writes files into the hot tier, as a Ray actor; without torch."""

from __future__ import annotations

from elastrata.replicas.parity import ParityPlan
from elastrata.replicas.storage import Replicas


class Writer:
    """Writes and reads on the node it runs on."""

    def write(self, storage: Replicas, data: bytes, *parts: str) -> None:
        storage.write(data, *parts)

    def write_with_parity(
        self, storage: Replicas, plan: ParityPlan, rank: int, data: bytes, *parts: str
    ) -> None:
        storage.hold_parity(plan, rank)
        storage.write(data, *parts)

    def read(self, storage: Replicas, *parts: str) -> bytes:
        return storage.read(*parts)
