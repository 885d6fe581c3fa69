"""The doctor: checks of this machine, each with a remedy."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elastrata.driver.ray_session import NICENESS, ray_session
from elastrata.recipe.yaml_reader import available_recipes
from elastrata.run.facts import versions
from elastrata.shipped import cluster_files, constraint_versions
from elastrata_pipelines.errors import UserError, pluralize
from elastrata_pipelines.storage import Storage

if TYPE_CHECKING:
    from elastrata.device.capabilities import CudaFault

_GIB = 2**30
# Ray gives 30% of the available memory to its object store and refuses to start if that is less
# than 75 MiB.
_RECOMMENDED_MEMORY_GIB, _LEAST_MEMORY_GIB = 4, 1
_LEAST_SHARED_GIB, _LEAST_DISK_GIB = 1, 10
_PROBE_BYTES = 2**20
_SECONDS_FOR_A_TASK = 60.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of one check."""

    name: str
    status: Literal["ok", "warning", "problem"]
    found: str
    advice: str = ""
    """The remedy; empty if none is needed."""


def examine(
    *,
    storage: str | None,
    tracking: str | None,
    address: str | None = None,
) -> Iterator[Finding]:
    """Run all checks and yield their findings one by one.

    Args:
        storage: folder or URL to test by writing; None to skip.
        tracking: MLflow's tracking URI to connect to; None to skip.
        address: address of a Ray cluster to test; None to start one on this machine.
    """
    yield from _versions()
    yield _recipes()
    machine = list(_machine())
    yield from machine
    yield from _gpus()
    # A local Ray would only fail again, and say less.
    if address is not None or all(finding.status != "problem" for finding in machine):
        yield from _ray(address)
    if storage is not None:
        advice = "check the path or URL, the credentials and the permissions"
        yield _try("storage", advice, lambda: _write_and_read(Storage(storage)))
    if tracking is not None:
        advice = "start it (mlflow server --port 5000), or check the address"
        yield _try("tracking", advice, lambda: _connect(tracking))


def _versions() -> Iterator[Finding]:
    tested = constraint_versions()
    for name, installed in versions().items():
        expected = tested.get(name)
        plain = installed.split("+")[0]  # torch 2.13.0+cpu is torch 2.13.0
        is_tested = expected is None or plain == expected
        yield Finding(
            name=name,
            status="ok" if is_tested else "warning",
            found=installed,
            advice="" if is_tested else f"tested with {expected}: pip install {name}=={expected}",
        )


def _recipes() -> Finding:
    recipes = available_recipes()
    is_whole = bool(recipes) and cluster_files().is_dir()
    return Finding(
        name="recipes",
        status="ok" if is_whole else "problem",
        found=f"{len(recipes)} recipes, cluster files in {cluster_files()}",
        advice="" if is_whole else "the installation is incomplete: reinstall it",
    )


def _machine() -> Iterator[Finding]:
    from elastrata.device.capabilities import spare_bytes

    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(
        name="cpus",
        status="ok" if cpus > 1 else "warning",
        found=str(cpus),
        advice="" if cpus > 1 else "data loading and training share one CPU, which is slow",
    )
    yield check_memory(spare_bytes())
    if sys.platform == "linux":  # elsewhere Ray uses a folder on disk
        yield check_shared_memory(Path("/dev/shm"))
    # By default runs are in the current folder, Ray's logs and spilled objects in the other one.
    folder = min((Path.cwd(), Path(tempfile.gettempdir())), key=_free_bytes)
    yield check_disk(folder, _free_bytes(folder))


def check_memory(available: int) -> Finding:
    """Return the finding for `available` bytes of memory that no process uses."""
    gib = available / _GIB
    return Finding(
        name="memory",
        status="ok" if gib >= _RECOMMENDED_MEMORY_GIB else _judge(gib >= _LEAST_MEMORY_GIB),
        found=f"{gib:.1f} GiB available",
        advice=""
        if gib >= _RECOMMENDED_MEMORY_GIB
        else f"Ray's object store and two workers need {_RECOMMENDED_MEMORY_GIB} GiB: close other "
        "programs",
    )


def check_shared_memory(folder: Path) -> Finding:
    """Return the finding for the file system that Ray's object store uses, `/dev/shm`."""
    if not folder.is_dir():
        return Finding(
            name=str(folder),
            status="problem",
            found="missing",
            advice="Ray's object store needs it: mount a tmpfs there",
        )
    free = _free_bytes(folder) / _GIB
    is_enough = free >= _LEAST_SHARED_GIB
    return Finding(
        name=str(folder),
        status="ok" if is_enough else "warning",
        found=f"{free:.1f} GiB free",
        advice="" if is_enough else "Ray's object store uses it: docker run --shm-size=4g",
    )


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def check_disk(folder: Path, free: int) -> Finding:
    """Return the finding for `free` bytes on the disk of a folder."""
    gib = free / _GIB
    is_enough = gib >= _LEAST_DISK_GIB
    return Finding(
        name="disk",
        status="ok" if is_enough else "warning",
        found=f"{gib:.1f} GiB free in {folder}",
        advice="" if is_enough else f"data, checkpoints and logs need {_LEAST_DISK_GIB} GiB",
    )


def _judge(is_usable: bool) -> Literal["warning", "problem"]:
    return "warning" if is_usable else "problem"


def _gpus() -> Iterator[Finding]:
    import torch

    from elastrata.device.capabilities import peak_flops

    if not torch.cuda.is_available():
        found = "none that PyTorch can use; training runs on the CPU"
        yield Finding(name="gpus", status="ok", found=found)
    for number in range(torch.cuda.device_count()):
        peak = peak_flops(torch.device("cuda", number))
        yield Finding(
            name=f"gpu {number}",
            status="ok",
            found=torch.cuda.get_device_name(number)
            + (f", {peak / 1e12:.0f} TFLOP/s dense bf16" if peak else ", unknown peak: no MFU"),
        )


def _try(name: str, advice: str, action: Callable[[], str]) -> Finding:
    """Run an action and return its outcome as a finding."""
    started = time.monotonic()
    try:
        outcome = action()
    except UserError as error:
        return Finding(name=name, status="problem", found=error.problems[0], advice=advice)
    except Exception as error:  # every library behind these checks raises its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Finding(name=name, status="problem", found=reason, advice=advice)
    return Finding(name=name, status="ok", found=f"{outcome} ({time.monotonic() - started:.1f} s)")


def _ray(address: str | None) -> Iterator[Finding]:
    """Check that Ray runs tasks, at which priority, and that PyTorch can use Ray's GPUs."""
    niceness: list[int] = []
    faults: dict[str, CudaFault] = {}
    if address is None:
        advice = "free memory and disk under /tmp, then look at Ray's logs"
        yield _try("ray start", advice, lambda: _run_tasks("local", niceness, faults))
    else:
        advice = "check the address, and that the versions of Ray and Python match"
        yield _try("ray cluster", advice, lambda: _run_tasks(address, niceness, faults))
    for node, fault in faults.items():
        yield Finding(
            name="ray's gpus",
            status="problem",
            found=f"node {node}: {fault.found}",
            advice=fault.advice,
        )
    if niceness:
        is_fair = max(niceness) <= 0
        where = "of every `ray start` there" if address else "here"
        yield Finding(
            name="niceness",
            status="ok" if is_fair else "warning",
            found=f"workers run at nice {max(niceness)}",
            advice=""
            if is_fair
            else f"{NICENESS}=0 in the environment {where}: otherwise other work starves data "
            "loading, and training waits",
        )


def _run_tasks(address: str, niceness: list[int], faults: dict[str, CudaFault]) -> str:
    """Run a task on every node; append each one's nice value to `niceness`, and add the reason why
    PyTorch cannot use its GPUs to `faults`."""
    with ray_session(address):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from elastrata.cluster.nodes import probe_gpu_nodes

        task = ray.remote(lambda: os.nice(0))
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        # Without CPUs, so that a busy cluster runs the tasks, too.
        refs = [task.options(num_cpus=0, scheduling_strategy=place).remote() for place in places]
        niceness.extend(ray.get(refs, timeout=_SECONDS_FOR_A_TASK))
        support = probe_gpu_nodes()
        faults.update({node: one.fault for node, one in support.items() if one.fault})
    if address == "local":
        return "a local cluster starts, runs a task and stops"
    return f"{address} answers and runs a task on each of {pluralize(len(nodes), 'node')}"


def _write_and_read(storage: Storage) -> str:
    """Write a file, read it back, compare it and delete it."""
    name = f"elastrata-doctor-{uuid.uuid4().hex[:8]}"
    data = os.urandom(_PROBE_BYTES)
    try:
        storage.write(data, name)
        if storage.sha256(name) != hashlib.sha256(data).hexdigest():
            raise UserError(f"{storage.uri(name)}: the data read back differs")
    finally:
        storage.delete(name)
    return f"{storage.uri()}: {_PROBE_BYTES // 2**20} MiB written, read back equal, deleted"


def _connect(uri: str) -> str:
    from elastrata.tracking.store import check_store, redact_uri, tracking_uri

    absolute = tracking_uri(uri, Storage("."))
    check_store(absolute)
    return f"{redact_uri(absolute)} answers"
