"""The registry of in-memory checkpoints: the store of each node, and which stores a writer uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastrata.checkpoints.commit import MARKER, FolderName
from elastrata.checkpoints.replicas.store import start_store

START_SECONDS = 60.0
"""How long a new store may take to start: a process, on a machine that is busy training."""
ANSWER_SECONDS = 2.0
"""How long to wait for a store before it is skipped: its node may be gone without notice."""
_REPLACE_SECONDS = 20.0
"""How long to wait for the store of a writer's own node before it is replaced: it may be stopped.
"""


@dataclass(frozen=True)
class Listing:
    """The files in all stores that answer."""

    sizes: dict[str, int]
    """Bytes of every file, by path."""
    holders: dict[str, list[str]]
    """Nodes that have a copy of a file, by path."""
    stores: dict[str, Any]
    """Handle of the store on each node."""


# It claims no CPU, which belongs to the workers, and Ray restarts it if it is killed.
@ray.remote(num_cpus=0, max_restarts=-1)
class ReplicaRegistry:
    """Registry of the stores, one on every node that needs one. The stores end with the registry,
    and the registry ends with the driver.

    It keeps no list of files, so that it cannot disagree with the stores. If it is killed, Ray
    restarts it empty.
    """

    def __init__(self, limit_bytes: int, answer_seconds: float) -> None:
        self._limit_bytes = limit_bytes
        self._answer_seconds = answer_seconds
        self._stores: dict[str, Any] = {}
        self._started: set[str] = set()
        self._group = ""
        self._assigned: dict[str, list[str]] = {}

    async def assign(self, node: str, group: str) -> list[Any]:
        """Return the stores for the files of a node's processes.

        Returns:
            The store on the same node, and one on another node if such a store answers.

        Raises:
            OSError: the store on the same node does not start.
        """
        alive = await self._begin(group)
        self._assigned[node] = [node]
        stores = [await self._get_own_store(node)]
        for other in ring_from(node, alive, self._assigned):
            # Entered before the wait, so that a concurrent delete() does not end this store as
            # unused.
            self._assigned[node] = [node, other]
            try:
                return [*stores, await self._get_answering_store(other)]
            except (OSError, ray.exceptions.RayError):  # a node that is dead, but not known to be
                self._assigned[node] = [node]
        return stores

    async def ping(self) -> None:
        """Answer, as a sign of life."""

    async def listing(self) -> Listing:
        """Return the files of all stores that answer in time."""
        # A copy, because other requests may change the stores during the wait.
        stores = dict(self._stores)
        listed = await asyncio.gather(*map(self._sizes, stores.values()))
        sizes: dict[str, int] = {}
        holders: dict[str, list[str]] = {}
        for node, held in zip(stores, listed, strict=True):
            sizes |= held
            for path in held:
                holders.setdefault(path, []).append(node)
        return Listing(sizes, holders, stores)

    async def _begin(self, group: str) -> set[str]:
        """Release the assignments and unfinished files of an earlier group; return the living
        nodes."""
        if group != self._group:
            self._group, self._assigned = group, {}
            await self._drop_unfinished()
        alive = _alive_nodes()
        for gone in self._stores.keys() - alive:
            self._forget(gone)
        return alive

    async def delete(self, path: str) -> None:
        """Delete a file or folder, and end stores that have no files and no writers."""
        stores = list(self._stores.values())
        await asyncio.gather(*(self._answer_or_none(store.delete.remote(path)) for store in stores))
        needed = {node for nodes in self._assigned.values() for node in nodes}
        for node in self._stores.keys() - needed:
            if not await self._sizes(self._stores[node]):
                self._end(node)

    async def usage(self) -> dict[str, int]:
        """Return the bytes held by each store that answers, by node."""
        stores = dict(self._stores)
        answers = (self._answer_or_none(store.used.remote()) for store in stores.values())
        used = await asyncio.gather(*answers)
        return {node: one or 0 for node, one in zip(stores, used, strict=True)}

    async def _drop_unfinished(self) -> None:
        """Delete the incomplete folders of earlier groups, which would occupy memory forever."""
        held = (await self.listing()).sizes
        whole = {path.partition("/")[0] for path in held if path.endswith(f"/{MARKER}")}
        for folder in {path.partition("/")[0] for path in held} - whole:
            # The present group may be writing its folders right now.
            if group_of(folder) != self._group:
                await self.delete(folder)

    async def _get_own_store(self, node: str) -> Any:
        """Return the store on a writer's node; replace it if it does not answer for long."""
        old_store = self._stores.get(node)
        try:
            return await self._get_answering_store(node, _REPLACE_SECONDS)
        except OSError:
            if node not in self._started:
                raise
            if self._stores.get(node) is old_store:  # else another rank has replaced it
                self._end(node)
            return await self._get_answering_store(node)

    def _end(self, node: str) -> None:
        ray.kill(self._stores[node])  # Ray sends SIGKILL after 5 s, to stopped ones too
        self._forget(node)

    async def _get_answering_store(self, node: str, seconds: float | None = None) -> Any:
        """Return the store on a node; start it if it is missing or has died."""
        seconds = seconds or self._answer_seconds
        if store := self._stores.get(node):
            try:
                return await self._wait_until_started(store, node, seconds)
            except ray.exceptions.ActorDiedError:
                if self._stores.get(node) is store:
                    self._forget(node)
        if node not in self._stores:
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            self._stores[node] = start_store(self._limit_bytes, here)
        return await self._wait_until_started(self._stores[node], node, seconds)

    async def _wait_until_started(self, store: Any, node: str, seconds: float) -> Any:
        # The start of a process takes longer than an answer.
        limit = seconds if node in self._started else START_SECONDS
        try:
            await asyncio.wait_for(store.sizes.remote(), limit)
        except TimeoutError:
            raise OSError(f"the store on node {node[:8]} does not answer") from None
        self._started.add(node)
        return store

    def _forget(self, node: str) -> None:
        self._stores.pop(node, None)
        self._started.discard(node)

    async def _sizes(self, store: Any) -> dict[str, int]:
        """Return the bytes of a store's files by path; empty if it does not answer."""
        return await self._answer_or_none(store.sizes.remote()) or {}

    async def _answer_or_none(self, answer: Any) -> Any:
        try:
            return await asyncio.wait_for(answer, self._answer_seconds)
        except (TimeoutError, ray.exceptions.RayError):
            return None


def start_registry(limit_bytes: int, answer_seconds: float = ANSWER_SECONDS) -> Any:
    """Return the handle of a new registry, on the node of this process and with its lifetime."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: Callable[..., Any] = ReplicaRegistry.options  # type: ignore[attr-defined]
    return options(scheduling_strategy=here).remote(limit_bytes, answer_seconds)


def group_of(folder: str) -> str:
    """Return the part of a folder's name that all commits of a group of workers share."""
    name = FolderName.parse(folder)
    return f"{name.attempt}-{name.token}" if name else folder


def ring_from(node: str, alive: Iterable[str], writing: Iterable[str]) -> list[str]:
    """Return the nodes that may take the second copy of a node's files, best first.

    They follow `node` in the ring of writing nodes, so that each of these takes the files of one
    other node. A node without writers is used only if `node` is the only writer.
    """
    # A store on an otherwise idle node would keep an autoscaler from removing it.
    others = set(alive) - {node}
    return sorted(others & set(writing) or others, key=lambda other: (other < node, other))


def _alive_nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}
