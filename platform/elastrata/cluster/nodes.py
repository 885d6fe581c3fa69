"""Nodes of a Ray cluster: those that new workers keep off, and whether an autoscaler adds more."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import NODE_ID_LABEL_KEY

from elastrata.cluster.ray_internals import draining_nodes, is_infeasible

_SECONDS_TO_CONNECT = 3.0
"""Long enough for one lost packet, which is sent again after a second."""
_MOST_AT_ONCE = 64
NODE_GROUP = "ray.io/node-group"
"""The label that Ray's cluster launcher and KubeRay give every node that is theirs."""
_SECONDS_TO_ANSWER = 5.0
ACCELERATOR = "accelerator_type:"
"""The resource that a node with such GPUs has."""


def draining() -> frozenset[str]:
    """Ids of the nodes that are about to go: drained, or about to be taken away."""
    return frozenset(draining_nodes())


def unreachable() -> frozenset[str]:
    """Ids of the nodes that Ray takes for alive, but whose raylets take no connection.

    Ray believes in a dead node until it has missed several health checks: 15 s with a raylet that
    was killed, longer with a machine that fell silent. A connection tells at once, or within three
    seconds.
    """
    alive = [node for node in nodes() if node["Alive"]]
    if not alive:
        return frozenset()
    with ThreadPoolExecutor(min(len(alive), _MOST_AT_ONCE)) as threads:
        answers = list(threads.map(_answers, alive))
    return frozenset(
        node["NodeID"] for node, answer in zip(alive, answers, strict=True) if not answer
    )


def nodes() -> list[Mapping[str, Any]]:
    """All that Ray says of every node, dead ones too."""
    described: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return described


def elsewhere(avoided: Iterable[str]) -> dict[str, str] | None:
    """A label selector for all nodes but these; None where all will do."""
    ids = sorted(avoided)
    return {NODE_ID_LABEL_KEY: f"!in({', '.join(ids)})"} if ids else None


def only_on(node: str) -> dict[str, str]:
    """A label selector for one node, by its id."""
    return {NODE_ID_LABEL_KEY: node}


def peaks_by_node(peaks: Mapping[str, float]) -> dict[str, float]:
    """FLOP/s of the GPUs of each node that says which it has.

    Args:
        peaks: by the family of the GPU.
    """
    found = {}
    for node in nodes():
        types = [name.removeprefix(ACCELERATOR) for name in node["Resources"]]
        known = [peaks[family] for family in peaks if family in types]
        if known:
            found[node["NodeID"]] = known[0]
    return found


def _answers(node: Mapping[str, Any]) -> bool:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    with contextlib.suppress(OSError), socket.create_connection(address, _SECONDS_TO_CONNECT):
        return True
    return False


def launches_nodes() -> bool:
    """Whether an autoscaler launches the cluster's nodes, as need be."""
    return any(NODE_GROUP in (node.get("Labels") or {}) for node in nodes() if node["Alive"])


def refuses() -> bool:
    """Whether the autoscaler can never have all that is asked of it; then it launches nothing."""
    try:
        return is_infeasible(_SECONDS_TO_ANSWER)
    except ray.exceptions.RpcError:
        return False
