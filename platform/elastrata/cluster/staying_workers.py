"""Workers that stay: when a group of workers ends, its processes serve in the next one.

Ray Train ends a whole group where one worker is lost, or one is to be added: every process, with
its imports, its CUDA context and what it has compiled, is started anew. Here the next group takes
over the processes that did nothing wrong, where they are, and the barrier of the group; only what
is missing is started. What a process does for a group is the same either way: a process group of
its own, the model, the state from the newest copy, the stream from there (`worker.py`). So both
ways give the same digests and losses.

Runs in Ray Train's controller; `staying_controller.py` says who may stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import override

from elastrata.cluster.leaving import leave
from elastrata.cluster.ray_train_internals import (
    BackendSetupCallback,
    ReplicaGroup,
    Worker,
    WorkerGroup,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerGroupStateBuilder,
    bundle_to_remote_args,
    invoke_context_managers,
)
from elastrata.cluster.worker_places import WorkerPlaces

_SECONDS_TO_LEAVE = 10.0
"""For the training thread of a worker to end, once its group is broken."""
_SECONDS_TO_START = 15.0
"""For what is missing to be there."""
_SECONDS_TO_PREPARE = 60.0
"""For room for newcomers, while the others train: nobody is halted for those that do not come."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Newcomers:
    """Workers for a larger group, which start while the smaller one trains."""

    actors: Mapping[int, Any]
    """By the numbers of their places."""
    calls: Sequence[Any]
    """Answered by those that are there."""
    since: float

    @property
    def are_there(self) -> bool:
        """Whether all of them are."""
        return not ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[1]


@dataclass(frozen=True)
class Stayed:
    """What is left of a group of workers, for the next one."""

    workers: Sequence[Worker]
    coming: Mapping[int, Any]
    """Actors that are starting, by the numbers of their places."""
    places: WorkerPlaces
    """Of the workers and, free, of those that are missing where their nodes are still good."""
    barrier: Any
    """Ray Train's `SynchronizationActor`."""

    def end(self) -> None:
        """Nobody takes it over."""
        ray.kill(self.barrier)
        self.places.shutdown()


class StayingWorkerGroup(WorkerGroup):
    """A group of workers that can let its workers go, and take over those of another."""

    stayed: Stayed | None = None
    """What it takes over."""
    newcomers: Newcomers | None = None
    """For the group after it, should that be larger."""

    def prepare(self, count: int, selector: Mapping[str, str] | None) -> bool | None:
        """Starts so many workers for the group after it, beside its own.

        Returns:
            Whether all are there; None: there is no room for them after all, and they are given up.
        """
        state: Any = self._worker_group_state
        places: WorkerPlaces = state.placement_group_handle
        if self.newcomers is None or len(self.newcomers.actors) != count:
            for number in self.newcomers.actors if self.newcomers else ():
                places.free(number)
            resources = self._worker_group_context.resources_per_worker
            actors = self._actors(places, places.reserve(resources, [selector] * count))
            calls = [actor.get_metadata.remote() for actor in actors.values()]
            self.newcomers = Newcomers(actors, calls, time.monotonic())
        if self.newcomers.are_there:
            return True
        is_late = time.monotonic() - self.newcomers.since > _SECONDS_TO_PREPARE
        if not is_late or all(places[number].wait(0) for number in self.newcomers.actors):
            return False
        for number in self.newcomers.actors:
            places.free(number)
        self.newcomers = None
        return None

    def let_go(self, staying: Collection[int], freed: Iterable[int]) -> Stayed:
        """Ends the group, but for the processes of workers that leave it in time.

        Args:
            staying: the ranks of those that may stay; the others are killed.
            freed: the ranks of those whose places are given back.
        """
        state: Any = self._worker_group_state
        places: WorkerPlaces = state.placement_group_handle
        stay = [state.workers[rank] for rank in staying]
        coming = dict(self.newcomers.actors) if self.newcomers else {}
        for callback in self._callbacks:
            if not isinstance(callback, BackendSetupCallback):  # each worker leaves by itself
                callback.before_worker_group_shutdown(self)
        for rank, worker in enumerate(state.workers):
            if rank not in staying:
                ray.kill(worker.actor)
        for rank in freed:
            places.free(_place(state.workers[rank]))
        lost = [place for place in places.numbers if place not in {*map(_place, stay), *coming}]
        coming |= self._actors(places, lost)
        for callback in self._callbacks:  # closes the streams, on which a worker may wait
            callback.after_worker_group_shutdown(self._worker_group_context)
        left = _leaving(stay)
        self._clear_state()  # type: ignore[no-untyped-call]
        return Stayed(workers=left, coming=coming, places=places, barrier=state.sync_actor)

    @override
    def _start_impl(self, worker_group_state_builder: WorkerGroupStateBuilder) -> None:
        if self.stayed:
            try:
                self._take_over(self.stayed)
                return
            except Exception as error:
                _logger.warning(f"all workers are started anew: {error!r}")
                self.stayed.end()
                self._clear_state()  # type: ignore[no-untyped-call]
        super()._start_impl(worker_group_state_builder)

    @override
    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        places, context = WorkerPlaces(), worker_group_context
        places.reserve(context.resources_per_worker, _selectors(context, context.num_workers))
        return places

    @override
    def _create_workers(
        self, num_workers: int, placement_group: Any, *args: Any, **kwargs: Any
    ) -> list[Worker]:
        actors = self._actors(placement_group, placement_group.numbers)
        return self._assign_worker_ranks(self._started(actors, seconds=None))

    def _take_over(self, stayed: Stayed) -> None:
        """Starts the group with what has stayed; as `_start_impl` of Ray Train does without."""
        context, barrier = self._worker_group_context, stayed.barrier
        callbacks: list[Any] = self._callbacks
        with invoke_context_managers([callback.on_worker_group_start for callback in callbacks]):
            for callback in callbacks:
                callback.before_worker_group_start(context)
            ray.get(barrier.reset.remote(), timeout=_SECONDS_TO_START)
            workers = self._assign_worker_ranks(self._completed(stayed))
            self._replica_groups = [
                ReplicaGroup([worker], context.resources_per_worker) for worker in workers
            ]
            self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}
            self._init_train_context(workers, barrier)
            builder: Any = WorkerGroupStateBuilder()  # type: ignore[no-untyped-call]
            self._worker_group_state = (
                builder.with_placement_group_handle(stayed.places)
                .with_sync_actor(barrier)
                .with_workers(workers)
                .build()
            )
            for callback in self._callbacks:
                callback.after_worker_group_start(self)
        ray.get([worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in workers])
        for callback in self._callbacks:
            callback.after_worker_group_training_start(self)

    def _completed(self, stayed: Stayed) -> list[Worker]:
        """Those that have stayed, and others in the places that are free and in new ones; in the
        order of their places."""
        context, places = self._worker_group_context, stayed.places
        missing = context.num_workers - len(stayed.workers)
        taken = {_place(worker) for worker in stayed.workers}
        free = [number for number in places.numbers if number not in taken]
        for number in free[missing:]:
            places.free(number)
        more = _selectors(context, max(0, missing - len(free)))
        added = places.reserve(context.resources_per_worker, more)
        if not places.wait(_SECONDS_TO_START):
            raise WorkerGroupStartupTimeoutError(context.num_workers)
        numbers = [*free[:missing], *added]
        others = self._actors(places, [n for n in numbers if n not in stayed.coming])
        actors = {n: stayed.coming[n] for n in numbers if n in stayed.coming} | others
        started = self._started(actors, seconds=_SECONDS_TO_START)
        return sorted([*stayed.workers, *started], key=_place)

    def _actors(self, places: WorkerPlaces, numbers: Iterable[int]) -> dict[int, Any]:
        """New actors in these places, as Ray Train's `_create_workers` starts them."""
        wanted: Any = self._train_run_context.run_config.worker_runtime_env
        kind = ray.remote(
            runtime_env=self._get_worker_runtime_env(custom_runtime_env=wanted),
            **bundle_to_remote_args(self._worker_group_context.resources_per_worker),
        )(self._worker_cls)
        return {
            number: kind.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=places[number], placement_group_bundle_index=0
                )
            ).remote()
            for number in numbers
        }

    def _started(self, actors: Mapping[int, Any], *, seconds: float | None) -> list[Worker]:
        """The workers of these actors, by place; an error where they are not there in time."""
        calls = [actor.get_metadata.remote() for actor in actors.values()]
        try:
            known = ray.get(calls, timeout=seconds)
        except ray.exceptions.RayError as error:
            for actor in actors.values():
                ray.kill(actor)
            raise WorkerGroupStartupFailedError("a worker's process did not start") from error
        resources = self._worker_group_context.resources_per_worker
        return [
            Worker(actor, metadata, resources, placement_group_bundle_index=number)
            for (number, actor), metadata in zip(actors.items(), known, strict=True)
        ]


def _place(worker: Worker) -> int:
    assert worker.placement_group_bundle_index is not None
    return worker.placement_group_bundle_index


def _selectors(context: Any, count: int) -> list[dict[str, str] | None]:
    """The label selectors of the first so many workers of a group."""
    return (context.label_selector or [None] * context.num_workers)[:count]


def _leaving(workers: Sequence[Worker]) -> list[Worker]:
    """Those that have left their group in time; the others are killed."""
    calls: dict[Any, Worker] = {
        worker.execute_async(leave, _SECONDS_TO_LEAVE): worker for worker in workers
    }
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=_SECONDS_TO_LEAVE + 1)
    gone = [calls[call] for call in late]
    for call in done:
        has_left = False
        with suppress(ray.exceptions.RayError):
            has_left = ray.get(call)
        if not has_left:
            gone.append(calls[call])
    for worker in gone:
        ray.kill(worker.actor)
    return [worker for worker in workers if worker not in gone]
