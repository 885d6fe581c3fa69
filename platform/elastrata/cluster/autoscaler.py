"""The cluster's autoscaler: whether there is one that launches nodes, and what it refuses."""

from __future__ import annotations

import ray
from ray.core.generated import autoscaler_pb2

from elastrata.cluster.nodes import nodes

_NODE_GROUP = "ray.io/node-group"
"""The label that Ray's cluster launcher and KubeRay give every node that is theirs."""
_SECONDS_TO_ANSWER = 5.0


def launches_nodes() -> bool:
    """Whether the cluster's nodes are launched by one, as need be."""
    labels = [node.get("Labels") or {} for node in nodes() if node["Alive"]]
    return any(_NODE_GROUP in found for found in labels)


def refuses() -> bool:
    """Whether it can never have what is asked of it; it then launches nothing at all."""
    client = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]
    reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
    try:
        reply.ParseFromString(client.get_cluster_status(timeout_s=_SECONDS_TO_ANSWER))
    except ray.exceptions.RpcError:
        return False
    return bool(reply.autoscaling_state.infeasible_cluster_resource_constraints)
