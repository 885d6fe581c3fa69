"""Ray's internals: all of Ray beside Ray Train that this project uses and Ray does not promise.

Nothing else imports `ray._private`, `ray._raylet` or Ray's protocol buffers; a new version of Ray
is looked at here. What belongs to Ray Train is in `ray_train_internals.py`, as its import takes a
second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

import ray
from ray._private import worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.services import canonicalize_bootstrap_address
from ray._private.state import state
from ray._private.utils import get_runtime_env_info
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import (
    autoscaler_pb2,
    common_pb2,
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)
from ray.experimental import internal_kv
from ray.runtime_env import RuntimeEnv

SETUP_HOOK = WORKER_PROCESS_SETUP_HOOK_ENV_VAR
"""The variable of a runtime environment that names what a process calls at its birth."""
ALIVE = gcs_pb2.GcsNodeInfo.ALIVE  # type: ignore[attr-defined]
PREEMPTION = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]


def head_client(address: str | None) -> Any:
    """A client of the head process (GCS) of a cluster; None: of the Ray that runs here.

    Raises:
        ConnectionError: no Ray runs here, or the cluster does not answer.
    """
    known = canonicalize_bootstrap_address(address or "auto")
    if known is None:
        raise ConnectionError("no Ray runs here")
    try:
        return GcsClient(address=known)
    except Exception as error:  # Ray's own kinds, which differ by version
        raise ConnectionError(f"{known}: no Ray cluster answers ({error})") from error


def own_node() -> Any:
    """The node of the session that this process has started: its processes and their settings."""
    return worker._global_node


def check_alive(address: str, seconds: float) -> None:
    """Asks a head process whether it lives.

    Raises:
        grpc.RpcError: how the call failed.
    """
    with closing(init_grpc_channel(address)) as channel:
        head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
        request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
        head.CheckAlive(request, timeout=seconds)


def draining_nodes() -> Iterable[str]:
    """Ids of the nodes that are being drained."""
    return state.get_draining_nodes() or ()


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Resources that nobody has claimed, by node."""
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def is_infeasible(seconds: float) -> bool:
    """Whether the cluster's autoscaler can never have what is asked of it.

    Raises:
        ray.exceptions.RpcError: the head process does not answer in time.
    """
    client = worker.global_worker.gcs_client  # type: ignore[attr-defined]
    reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
    reply.ParseFromString(client.get_cluster_status(timeout_s=seconds))
    return bool(reply.autoscaling_state.infeasible_cluster_resource_constraints)


def keep(key: str, value: str) -> None:
    """Keeps a value in the tables of the cluster."""
    internal_kv._internal_kv_put(key, value.encode())


def kept(key: str) -> str | None:
    """The value that was kept there."""
    value: Any = internal_kv._internal_kv_get(key)
    return value.decode() if value else None


def placement_groups_of(actor: str) -> list[bytes]:
    """Ids of the placement groups that an actor has made and nobody has removed."""
    accessor: Any = state._connect_and_get_accessor()
    groups: list[Any] = [
        gcs_pb2.PlacementGroupTableData.FromString(data)  # type: ignore[attr-defined]
        for data in accessor.get_placement_group_table()
    ]
    return [
        group.placement_group_id
        for group in groups
        if group.creator_actor_id.hex() == actor and group.state != group.REMOVED
    ]


def prestart(address: str, *, keep_seconds: float, seconds: float) -> None:
    """Asks a raylet for an idle process with the caller's runtime environment and job.

    Args:
        address: of the raylet.
        keep_seconds: after which Ray may end the process.
        seconds: to answer in.
    """
    context = ray.get_runtime_context()
    serialized = context.get_runtime_env_string()  # type: ignore[no-untyped-call]
    environment = get_runtime_env_info(RuntimeEnv.deserialize(serialized))
    environment.serialized_runtime_env = serialized  # compared by its hash: not a byte may differ
    request = node_manager_pb2.PrestartWorkersRequest(  # type: ignore[attr-defined]
        language=common_pb2.Language.PYTHON,  # type: ignore[attr-defined]
        job_id=bytes.fromhex(context.get_job_id()),
        runtime_env_info=environment,
        keep_alive_duration_secs=keep_seconds,
        num_workers=1,
    )
    with closing(init_grpc_channel(address)) as channel:
        raylet = node_manager_pb2_grpc.NodeManagerServiceStub(channel)  # type: ignore[no-untyped-call]
        raylet.PrestartWorkers(request, timeout=seconds)


def replace_printer(printer: Callable[..., None]) -> Callable[..., None]:
    """Has a function print the lines of other processes in this one; returns the one before."""
    before: Callable[..., None] = worker.print_to_stdstream
    worker.print_to_stdstream = printer
    return before
