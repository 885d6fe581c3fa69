"""Draining: tells a Ray cluster that this machine will be gone, as `ray drain-node` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2, gcs_pb2

_SECONDS_TO_ANSWER = 5.0
_ALIVE = gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]
_REASON = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]


class Nodes:
    """The Ray nodes of this machine.

    Args:
        address: of the cluster; None: that of the Ray which runs here.
        node_id: of the only node that is meant; None: every node with this machine's address.

    Raises:
        ConnectionError: no Ray runs here, or the cluster does not answer.
    """

    def __init__(self, address: str | None, node_id: str | None) -> None:
        found = canonicalize_bootstrap_address(address or "auto")
        if found is None:
            raise ConnectionError("no Ray runs here")
        self._gcs = _connected(found)
        self._node_id = node_id
        self._ip = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]

    def alive(self) -> list[str]:
        """Their ids, while Ray takes them for alive."""
        nodes = self._gcs.get_all_node_info(timeout=_SECONDS_TO_ANSWER)
        return [
            node.node_id.hex()
            for node in nodes.values()
            if node.state == _ALIVE and self._is_meant(node)
        ]

    def drain(self, ids: Sequence[str], text: str, time: float) -> list[str]:
        """Tells the cluster that the nodes will be gone; what it says where it refuses.

        Args:
            ids: of the nodes.
            text: why.
            time: when, in Unix time.
        """
        answers = [
            self._gcs.drain_node(node, _REASON, text, math.floor(time * 1000)) for node in ids
        ]
        return [str(reason) for is_accepted, reason in answers if not is_accepted]

    def _is_meant(self, node: Any) -> bool:
        if self._node_id is not None:
            return bool(node.node_id.hex() == self._node_id)
        return bool(node.node_manager_address == self._ip)


def _connected(address: str) -> Any:
    try:
        return GcsClient(address=address)
    except Exception as error:  # Ray's own kinds, which differ by version
        raise ConnectionError(f"{address}: no Ray cluster answers ({error})") from error
