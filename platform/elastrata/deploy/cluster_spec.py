"""The outline of a cluster: kinds of nodes, how many of each there can ever be, and whether what a
recipe asks for fits on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from elastrata.cluster.ray_processes import NICENESS
from elastrata.launch.doctor import Finding
from elastrata.recipe.recipe import WorkersConfig

_ROUNDING = 1e-6
"""Three workers of 0.4 CPUs need no more than 1.2."""
_READERS_CPUS = 1
"""CPUs that reading the data wants, beside the workers."""


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one kind."""

    name: str
    resources: Mapping[str, float]
    """Amounts on one node, by Ray's names: `CPU`, `GPU`."""
    min_nodes: int
    max_nodes: int

    def room(self, worker: Mapping[str, float]) -> int:
        """Workers of these resources that fit on one node.

        Args:
            worker: what one worker claims; at least one amount is above 0.
        """
        return min(
            int((self.resources.get(name, 0.0) + _ROUNDING) // amount)
            for name, amount in worker.items()
            if amount > 0
        )


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The nodes that a cluster file can ever provide."""

    file: str
    """As the user named it."""
    head: NodeGroup
    groups: tuple[NodeGroup, ...]
    """Nodes beside the head."""
    max_nodes: int
    """Most nodes of these groups together."""

    def room(self, worker: Mapping[str, float]) -> int:
        """The most workers of these resources that there can ever be at once."""
        return int(self._most(lambda group: group.room(worker)))

    def amount(self, resource: str) -> float:
        """The most of a resource that there can ever be at once."""
        return self._most(lambda group: group.resources.get(resource, 0.0))

    def _most(self, on_a_node: Callable[[NodeGroup], float]) -> float:
        """The sum over the head, the nodes that always run, and the best choice of others."""
        total = on_a_node(self.head)
        total += sum(group.min_nodes * on_a_node(group) for group in self.groups)
        free = self.max_nodes - sum(group.min_nodes for group in self.groups)
        for group in sorted(self.groups, key=on_a_node, reverse=True):
            count = max(0, min(group.max_nodes - group.min_nodes, free))
            total += count * on_a_node(group)
            free -= count
        return total


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
