"""Nodes of a Ray cluster: which ones new workers avoid, and whether an autoscaler adds more."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import NODE_ID_LABEL_KEY
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.cluster.ray_internals import draining_nodes, is_infeasible
from elastrata.device.capabilities import GpuSupport, probe_gpus

# Long enough for one lost packet, which is sent again after a second.
_SECONDS_TO_CONNECT = 3.0
"""Timeout of a connection."""
_MOST_AT_ONCE = 64
NODE_GROUP = "ray.io/node-group"
"""The label that Ray's cluster launcher and KubeRay give to every node that they start."""
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_IMPORT_TORCH = 60.0
ACCELERATOR = "accelerator_type:"
"""Prefix of the resource that a node with GPUs has, before their type."""


def draining_node_ids() -> frozenset[str]:
    """Return the ids of the nodes that are being drained."""
    return frozenset(draining_nodes())


def unreachable_node_ids() -> frozenset[str]:
    """Return the ids of the nodes that Ray lists as alive, but whose raylets accept no
    connection."""
    # Ray lists a dead node as alive until it has missed several health checks: 15 s if its raylet
    # was killed, longer if the machine is silent. A connection shows it within 3 s.
    alive = [node for node in list_nodes() if node["Alive"]]
    if not alive:
        return frozenset()
    with ThreadPoolExecutor(min(len(alive), _MOST_AT_ONCE)) as threads:
        answers = list(threads.map(_answers, alive))
    return frozenset(
        node["NodeID"] for node, answer in zip(alive, answers, strict=True) if not answer
    )


def list_nodes() -> list[Mapping[str, Any]]:
    """Return Ray's description of every node, including dead ones."""
    described: list[Mapping[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return described


def selector_excluding(avoided: Iterable[str]) -> dict[str, str] | None:
    """Return a label selector for all nodes but these; None if none is avoided."""
    ids = sorted(avoided)
    return {NODE_ID_LABEL_KEY: f"!in({', '.join(ids)})"} if ids else None


def selector_for(node: str) -> dict[str, str]:
    """Return a label selector for one node, by its id."""
    return {NODE_ID_LABEL_KEY: node}


def peaks_by_node(peaks: Mapping[str, float]) -> dict[str, float]:
    """Return the FLOP/s of the GPUs of each node that names their type.

    Args:
        peaks: FLOP/s by GPU family.
    """
    by_node = {}
    for node in list_nodes():
        types = [name.removeprefix(ACCELERATOR) for name in node["Resources"]]
        node_peaks = [peaks[family] for family in peaks if family in types]
        if node_peaks:
            by_node[node["NodeID"]] = node_peaks[0]
    return by_node


def _answers(node: Mapping[str, Any]) -> bool:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    with contextlib.suppress(OSError), socket.create_connection(address, _SECONDS_TO_CONNECT):
        return True
    return False


def has_autoscaler() -> bool:
    """Return True if an autoscaler launches the cluster's nodes on demand."""
    return any(NODE_GROUP in (node.get("Labels") or {}) for node in list_nodes() if node["Alive"])


def autoscaler_refuses() -> bool:
    """Return True if the autoscaler can never meet all requests; then it launches nothing."""
    try:
        return is_infeasible(_SECONDS_TO_ANSWER)
    except ray.exceptions.RpcError:
        return False


def probe_gpu_nodes() -> dict[str, GpuSupport]:
    """Return what PyTorch can do with the GPUs of each node that has any, by its address. Nodes
    that do not answer in time are left out."""
    nodes = [node for node in list_nodes() if node["Alive"] and node["Resources"].get("GPU")]
    calls = {
        _probe_gpus.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(): node["NodeManagerAddress"]
        for node in nodes
    }
    if not calls:
        return {}
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=_SECONDS_TO_IMPORT_TORCH)
    found: dict[str, GpuSupport] = {}
    for call in done:
        with contextlib.suppress(ray.exceptions.RayError):
            found[calls[call]] = ray.get(call)
    return dict(sorted(found.items()))


# Claims no CPU or GPU, as another run may have claimed all.
@ray.remote(num_cpus=0, max_calls=1)
def _probe_gpus() -> GpuSupport:
    # Ray may hide the GPUs from tasks that claim none; any other choice is the user's.
    # `max_calls`: no other task gets this process.
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        del os.environ["CUDA_VISIBLE_DEVICES"]
    return probe_gpus()
