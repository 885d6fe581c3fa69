"""The fit: whether what a recipe asks for can ever be had on the cluster of a file."""

from __future__ import annotations

from collections.abc import Iterator

from elastrata.cluster.ray_processes import NICENESS
from elastrata.deploy.cluster_spec import ClusterSpec
from elastrata.launch.doctor import Finding
from elastrata.recipe.recipe import WorkersConfig

_READERS_CPUS = 1
"""CPUs that reading the data wants, beside the workers."""


def cluster_findings(cluster: ClusterSpec) -> Iterator[Finding]:
    """The most that there can ever be."""
    resources = {name for group in (cluster.head, *cluster.groups) for name in group.resources}
    amounts = [f"{cluster.amount(name):g} {name}s" for name in ("CPU", "GPU") if name in resources]
    yield Finding(
        name="cluster",
        status="ok",
        found=f"{cluster.file}: at most {cluster.max_nodes} nodes beside the head, "
        f"{', '.join(amounts)}",
    )


def niceness_findings(file: str, text: str) -> Iterator[Finding]:
    """Whether a cluster file sees to the priority of workers, which is that of `ray start`.

    Args:
        file: as the user named it.
        text: all that it says.
    """
    is_named = NICENESS in text
    yield Finding(
        name="niceness",
        status="ok" if is_named else "warning",
        found=f"{file}: {NICENESS} is {'set' if is_named else 'not set'}",
        advice=""
        if is_named
        else f"{NICENESS}=0 in the environment of every `ray start`: at Ray's own 15 reading data "
        "starves beside any other work, and training waits",
    )


def fit_findings(workers: WorkersConfig, cluster: ClusterSpec) -> Iterator[Finding]:
    """Whether the workers of a recipe can be had, and whether anything is left to feed them."""
    worker = worker_resources(workers, cluster)
    claim = " + ".join(f"{amount:g} {name}" for name, amount in worker.items())
    rooms = {group.name: group.room(worker) for group in (cluster.head, *cluster.groups)}
    fitting = [f"{count} on a node of {name}" for name, count in rooms.items() if count]
    yield Finding(
        name="worker",
        status="ok" if fitting else "problem",
        found=f"{claim}: {', '.join(fitting) or 'more than any node has'}",
        advice="" if fitting else "lower workers.cpus or workers.gpus, or add larger nodes",
    )
    room = cluster.room(worker)
    yield Finding(
        name="workers.min",
        status="ok" if workers.min <= room else "problem",
        found=f"{workers.min}, and there is room for {room} at most",
        advice="" if workers.min <= room else _advice("min", room),
    )
    most = room if workers.max == "auto" else workers.max
    yield Finding(
        name="workers.max",
        status="ok" if most <= room else "warning",
        found=f"{workers.max}, and there is room for {room} at most",
        advice="" if most <= room else _advice("max", room),
    )
    count = min(most, room)
    left = cluster.amount("CPU") - count * workers.cpus
    is_enough = left >= _READERS_CPUS
    yield Finding(
        name="reading",
        status="ok" if is_enough else "warning",
        found=f"{left:g} CPUs left beside {count} workers",
        advice=""
        if is_enough
        else f"workers.cpus below {workers.cpus:g}: data is read with the rest",
    )


def worker_resources(workers: WorkersConfig, cluster: ClusterSpec) -> dict[str, float]:
    """The resources that each worker claims; a GPU under `auto` where the cluster can have any."""
    gpus = workers.gpus_each(cluster.amount("GPU"))
    return {"CPU": workers.cpus, **({"GPU": gpus} if gpus else {})}


def _advice(bound: str, room: int) -> str:
    if not room:
        return "another cluster file"
    return f"workers.{bound}={room}, or a larger maximum in the file"
