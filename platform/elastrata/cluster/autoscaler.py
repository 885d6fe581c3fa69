"""The cluster's autoscaler: whether there is one that launches nodes, and what it refuses."""

from __future__ import annotations

import ray

from elastrata.cluster.nodes import nodes
from elastrata.cluster.ray_internals import is_infeasible

_NODE_GROUP = "ray.io/node-group"
"""The label that Ray's cluster launcher and KubeRay give every node that is theirs."""
_SECONDS_TO_ANSWER = 5.0


def launches_nodes() -> bool:
    """Whether the cluster's nodes are launched by one, as need be."""
    labels = [node.get("Labels") or {} for node in nodes() if node["Alive"]]
    return any(_NODE_GROUP in found for found in labels)


def refuses() -> bool:
    """Whether it can never have what is asked of it; it then launches nothing at all."""
    try:
        return is_infeasible(_SECONDS_TO_ANSWER)
    except ray.exceptions.RpcError:
        return False
