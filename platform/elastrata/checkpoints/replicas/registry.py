"""The registry of replicas: which nodes have stores, which writers give their files to which."""

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
"""A store that takes longer is passed over: its node may be gone without a word."""
_REPLACE_SECONDS = 20.0
"""A store that takes longer to answer its own node's writer is replaced: it may be stopped."""


@dataclass(frozen=True)
class Listing:
    """The files in the stores that answer."""

    sizes: dict[str, int]
    """Bytes of every file, by path."""
    holders: dict[str, list[str]]
    """Nodes that have a copy of a file, by path."""
    stores: dict[str, Any]
    """Handle of the store on each node."""


@ray.remote(num_cpus=0, max_restarts=-1)
class ReplicaRegistry:
    """Starts a store on every node that needs one; they die with it, and it with the driver.

    It remembers no files: what a store says it has is what there is. Where it is killed, an empty
    one takes its place.
    """

    def __init__(self, limit_bytes: int, answer_seconds: float) -> None:
        self._limit_bytes = limit_bytes
        self._answer_seconds = answer_seconds
        self._stores: dict[str, Any] = {}
        self._started: set[str] = set()
        self._group = ""
        self._assigned: dict[str, list[str]] = {}

    async def assign(self, node: str, group: str) -> list[Any]:
        """The stores that take the files of the processes on a node.

        Returns:
            One on the same node; one more on another node, where there is one that answers.

        Raises:
            OSError: the one on the same node does not start.
        """
        alive = await self._begin(group)
        self._assigned[node] = [node]
        stores = [await self._own_store(node)]
        for other in ring_from(node, alive, self._assigned):
            self._assigned[node] = [node, other]
            try:
                return [*stores, await self._answering(other)]
            except (OSError, ray.exceptions.RayError):  # a node that is dead, but not known to be
                self._assigned[node] = [node]
        return stores

    async def ping(self) -> None:
        """Answer, so that a caller knows it lives."""

    async def listing(self) -> Listing:
        """The files that there are, by the stores that answer at once."""
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
        """Lets go of what another group of workers used; returns the nodes that are alive."""
        if group != self._group:
            self._group, self._assigned = group, {}
            await self._drop_unfinished()
        alive = _alive_nodes()
        for gone in self._stores.keys() - alive:
            self._forget(gone)
        return alive

    async def delete(self, path: str) -> None:
        """Deletes a file or folder; stores without files that nobody writes to end."""
        stores = list(self._stores.values())
        await asyncio.gather(*(self._quietly(store.delete.remote(path)) for store in stores))
        needed = {node for nodes in self._assigned.values() for node in nodes}
        for node in self._stores.keys() - needed:
            if not await self._sizes(self._stores[node]):
                self._end(node)

    async def usage(self) -> dict[str, int]:
        """Bytes held on every node that has a store which answers."""
        stores = dict(self._stores)
        asked = (self._quietly(store.used.remote()) for store in stores.values())
        used = await asyncio.gather(*asked)
        return {node: one or 0 for node, one in zip(stores, used, strict=True)}

    async def _drop_unfinished(self) -> None:
        """Frees what a group before left half written: it would take the room for ever."""
        held = (await self.listing()).sizes
        whole = {path.partition("/")[0] for path in held if path.endswith(f"/{MARKER}")}
        for folder in {path.partition("/")[0] for path in held} - whole:
            if group_of(folder) != self._group:
                await self.delete(folder)

    async def _own_store(self, node: str) -> Any:
        """The store on a writer's node; one that does not answer for long is replaced."""
        asked = self._stores.get(node)
        try:
            return await self._answering(node, _REPLACE_SECONDS)
        except OSError:
            if node not in self._started:
                raise
            if self._stores.get(node) is asked:  # else another rank has replaced it
                self._end(node)
            return await self._answering(node)

    def _end(self, node: str) -> None:
        ray.kill(self._stores[node])  # Ray sends SIGKILL after 5 s, to stopped ones too
        self._forget(node)

    async def _answering(self, node: str, seconds: float | None = None) -> Any:
        """The store on a node, started where there is none or the one there was has died."""
        seconds = seconds or self._answer_seconds
        if store := self._stores.get(node):
            try:
                return await self._waited_for(store, node, seconds)
            except ray.exceptions.ActorDiedError:
                if self._stores.get(node) is store:
                    self._forget(node)
        if node not in self._stores:
            here = NodeAffinitySchedulingStrategy(node, soft=False)
            self._stores[node] = start_store(self._limit_bytes, here)
        return await self._waited_for(self._stores[node], node, seconds)

    async def _waited_for(self, store: Any, node: str, seconds: float) -> Any:
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
        """Bytes of a store's files; none if it does not answer."""
        return await self._quietly(store.sizes.remote()) or {}

    async def _quietly(self, answer: Any) -> Any:
        try:
            return await asyncio.wait_for(answer, self._answer_seconds)
        except (TimeoutError, ray.exceptions.RayError):
            return None


def start_registry(limit_bytes: int, answer_seconds: float = ANSWER_SECONDS) -> Any:
    """Handle of a new registry, on the node of this process, gone with it."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: Callable[..., Any] = ReplicaRegistry.options  # type: ignore[attr-defined]
    return options(scheduling_strategy=here).remote(limit_bytes, answer_seconds)


def group_of(folder: str) -> str:
    """The part of a folder's name that all commits of a group of workers have in common."""
    name = FolderName.parse(folder)
    return f"{name.attempt}-{name.token}" if name else folder


def ring_from(node: str, alive: Iterable[str], writing: Iterable[str]) -> list[str]:
    """The nodes that may take the second copy of a node's files, the first choice first.

    They follow `node` in the ring of those that write, so that every one of them takes the files of
    one other. A node that writes nothing is taken only where `node` writes alone: a store on it
    keeps an autoscaler from taking it away.
    """
    others = set(alive) - {node}
    return sorted(others & set(writing) or others, key=lambda other: (other < node, other))


def _alive_nodes() -> set[str]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"] for node in nodes if node["Alive"]}
