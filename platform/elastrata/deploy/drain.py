"""Draining: tells a Ray cluster that this machine will be gone, as `ray drain-node` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ray

from elastrata.cluster.ray_internals import ALIVE, PREEMPTION, head_client

_SECONDS_TO_ANSWER = 5.0


class Nodes:
    """The Ray nodes of this machine.

    Args:
        address: of the cluster; None: that of the Ray which runs here.
        node_id: of the only node that is meant; None: every node with this machine's address.

    Raises:
        ConnectionError: no Ray runs here, or the cluster does not answer.
    """

    def __init__(self, address: str | None, node_id: str | None) -> None:
        self._gcs = head_client(address)
        self._node_id = node_id
        self._ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def alive(self) -> list[str]:
        """Their ids, while Ray takes them for alive."""
        nodes = self._gcs.get_all_node_info(timeout=_SECONDS_TO_ANSWER)
        return [
            node.node_id.hex()
            for node in nodes.values()
            if node.state == ALIVE and self._is_meant(node)
        ]

    def drain(self, ids: Sequence[str], text: str, time: float) -> list[str]:
        """Tells the cluster that the nodes will be gone; what it says where it refuses.

        Args:
            ids: of the nodes.
            text: why.
            time: when, in Unix time.
        """
        answers = [
            self._gcs.drain_node(node, PREEMPTION, text, math.floor(time * 1000)) for node in ids
        ]
        return [str(reason) for is_accepted, reason in answers if not is_accepted]

    def _is_meant(self, node: Any) -> bool:
        if self._node_id is not None:
            return bool(node.node_id.hex() == self._node_id)
        return bool(node.node_manager_address == self._ip)
