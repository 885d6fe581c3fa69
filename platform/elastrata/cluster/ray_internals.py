"""Ray's internals: the parts of Ray, except Ray Train, that are used but not public.

No other module imports `ray._private`, `ray._raylet` or Ray's protocol buffers. Each function says
which public way is missing; `cluster/RAY_INTERNALS.md` says what breaks without it. Check
this file first when Ray's version changes. Ray Train's internals are in `ray_train_internals.py`,
as their import takes a second.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import grpc
import ray
from ray._private import services, utils, worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
from ray._private.state import state
from ray._private.utils import get_runtime_env_info
from ray.core.generated import (
    autoscaler_pb2,
    common_pb2,
    gcs_pb2,
    gcs_service_pb2,
    gcs_service_pb2_grpc,
    node_manager_pb2,
    node_manager_pb2_grpc,
)
from ray.exceptions import AuthenticationError
from ray.experimental import internal_kv
from ray.runtime_env import RuntimeEnv

# `runtime_env={"worker_process_setup_hook": ...}` works in `ray.init` alone: a session that the
# user has opened would have no hook, and in our own every process of the job would run it.
SETUP_HOOK = WORKER_PROCESS_SETUP_HOOK_ENV_VAR
"""The variable of a runtime environment that names a function which a process calls when it
starts."""


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Run a block with `ray.init` that does not replace this process's handler of SIGTERM."""
    # `ray.init` replaces it three times: by a function that exits with code 15, by one that exits
    # with code 1, and, in C++, by one that prints a stack and ends the process by the signal. The
    # last one is installed once in a process, so it is installed before ours is set again.
    handler = signal.getsignal(signal.SIGTERM)
    library = ctypes.CDLL(ray._raylet.__file__)
    install = getattr(library, "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb", None)
    if install:
        install(ctypes.c_char_p(None), ctypes.c_bool(True))
        signal.signal(signal.SIGTERM, handler)
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        # Nothing changes unless a later version of Ray has other ways.
        signal.signal(signal.SIGTERM, handler)


def resolve_head(address: str) -> str:
    """Return host and port of a cluster's head process, which for `auto` is that of this machine.

    Raises:
        OSError: no Ray runs here, or there is no such host.
        ValueError: it is no address.
    """
    # `ray.init` has no way to look before it connects.
    return str(services.canonicalize_bootstrap_address(address))


def check_head(address: str, seconds: float) -> None:
    """Check that a head process answers, and lets this process in.

    Args:
        address: its host and port.
        seconds: timeout of the call.

    Raises:
        PermissionError: it wants another token.
        ConnectionError: it does not answer.
    """
    # `ray.init` tries for 20 s without a right token and for longer without an answer, and logs
    # each attempt.
    request = gcs_service_pb2.CheckAliveRequest()  # type: ignore[attr-defined]
    try:
        with closing(init_grpc_channel(address)) as channel:
            head = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)  # type: ignore[no-untyped-call]
            head.CheckAlive(request, timeout=seconds)
    except AuthenticationError as error:  # this process has no token
        raise PermissionError(str(error)) from None
    except grpc.RpcError as error:
        reason = str(error.details())
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise PermissionError(reason) from None
        raise ConnectionError(reason) from None


def draining_nodes() -> Iterable[str]:
    """Return the ids of the nodes that are being drained."""
    # Neither `ray.nodes()` nor `ray list nodes` shows them, and
    # `ray.train.get_preemption_info()` is a barrier of workers.
    return state.get_draining_nodes() or ()


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return the unclaimed resources by node."""
    # `ray.available_resources()` gives the sum over all nodes.
    free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return free


def is_infeasible(seconds: float) -> bool:
    """Return True if the cluster's autoscaler can never provide all requested resources.

    Args:
        seconds: timeout of the call.

    Raises:
        ray.exceptions.RpcError: the head process does not answer in time.
    """
    # `ray.autoscaler.v2.sdk.get_cluster_status` leaves infeasible constraints out.
    client = worker.global_worker.gcs_client  # type: ignore[attr-defined]
    reply = autoscaler_pb2.GetClusterStatusReply()  # type: ignore[attr-defined]
    reply.ParseFromString(client.get_cluster_status(timeout_s=seconds))
    return bool(reply.autoscaling_state.infeasible_cluster_resource_constraints)


def store_value(key: str, value: str) -> None:
    """Store a value in the cluster's key-value store."""
    internal_kv._internal_kv_put(key, value.encode())


def read_value(key: str) -> str | None:
    """Return the value of a key in the cluster's key-value store; None if it has none."""
    value: Any = internal_kv._internal_kv_get(key)
    return value.decode() if value else None


def placement_groups_of(actor: str) -> list[bytes]:
    """Return the ids of the placement groups that an actor has created and that still exist."""
    # `placement_group_table()` does not name the creator, and Ray Train gives its groups no name.
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


def request_process(address: str, *, keep_seconds: float, seconds: float) -> None:
    """Request an idle process with the caller's runtime environment and job from a raylet.

    Args:
        address: address of the raylet.
        keep_seconds: time after which Ray may end the process.
        seconds: timeout of the call.
    """
    # Ray has no Python call for it; its own `prestart_worker_first_driver` starts plain processes.
    context = ray.get_runtime_context()
    serialized = context.get_runtime_env_string()  # type: ignore[no-untyped-call]
    environment = get_runtime_env_info(RuntimeEnv.deserialize(serialized))
    environment.serialized_runtime_env = serialized  # Ray compares its hash
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
    """Install a function that prints the output of other processes; return the previous one."""
    # `ray.init(log_to_driver=False)` still prints every error in the cluster, in pages.
    before: Callable[..., None] = worker.print_to_stdstream
    worker.print_to_stdstream = printer
    return before
