"""Workers that stay: when a group of workers ends, its processes serve in the next group.

Ray Train ends a whole group when one worker is lost or added: every process, with its imports, its
CUDA context and its compiled code, is started anew. Here the next group takes over the processes
that did not fail, and only missing ones are started. A process does the same for every group
(`worker.py`): it joins a new process group, builds the model, loads the newest state and opens the
stream at that state. Digests and losses equal those of workers that are started anew.

Sections: places of workers; leaving a group, in a worker; the group and its handover to the next
one, in Ray Train's controller.
"""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any, ClassVar

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch.distributed.distributed_c10d import _abort_process_group
from typing_extensions import override

from elastrata.cluster.failure_attribution import creation_error, is_victim
from elastrata.cluster.ray_train_internals import (
    ControllerCallback,
    PlacedWorkerGroup,
    PlacementGroupHandle,
    RayTrainWorker,
    ResizeDecision,
    TrainController,
    TrainRunContext,
    Worker,
    WorkerGroupCallback,
    WorkerGroupContext,
    WorkerGroupStartupFailedError,
    bundle_to_remote_args,
    get_env_vars_to_propagate,
    training_has_ended,
)
from elastrata.device.device_transfer import collectives_aborted
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from elastrata.cluster.scaling_policy import GracefulScalingPolicy

STAYING_VARIABLES = {
    # Ray gives every worker of a node the union of the group's GPU ids and takes a worker's device
    # as an index into it. CUDA reads the variable once per process: a process of ids 0,1,2,3 that
    # stays in a group of 1,2,3 would compute on 0,1,2. Without sharing, each process sees its own
    # GPU alone, as device 0 of every group (NCCL reaches GPUs of other processes by their bus ids).
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
}
"""Environment of the controller of workers that stay."""
STAYING_WORKER_VARIABLES = {
    # Under Ray's choice, 1, NCCL's watchdog ends the process when a collective is aborted.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Environment of workers that stay."""
WORKER_VARIABLES = {
    # Under Ray's choice, 1, NCCL's watchdog aborts a failed collective before it ends the process,
    # and until then the training thread reads garbage. 3 ends the process without an abort.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
}
"""Environment of workers that do not stay."""
_SECONDS_TO_LEAVE = 10.0
"""Time for a worker's training thread to end once its group is broken."""
_SECONDS_TO_START = 15.0
"""Time for missing workers to start while the others wait."""
_SECONDS_TO_PREPARE = 60.0
"""Time for newcomers to get resources; the others train until all newcomers have started."""
_logger = logging.getLogger(__name__)

# ------------------------------------------------------------------------------- places of workers

_numbers = count()


@dataclass(frozen=True)
class Newcomers:
    """Workers for a larger group, which start while the smaller one trains."""

    actors: Mapping[int, Any]
    """Actors by the numbers of their places."""
    calls: Sequence[Any]
    """A pending call to each actor, answered once it has started."""
    since: float

    @property
    def have_started(self) -> bool:
        """True once every newcomer has started."""
        return not ray.wait(list(self.calls), num_returns=len(self.calls), timeout=0)[1]


# One bundle per placement group, so that workers come and go singly. Ray places each bundle on the
# node on which it leaves the least free, so workers are packed on few nodes.
class WorkerPlaces(PlacementGroupHandle):
    """The placement groups of a group's workers, one per worker.

    Places have numbers that are unique in this process.

    Args:
        run: context of the run, with the workers' runtime environment.
        resources: resources of one worker.
    """

    has_started: ClassVar[bool] = False
    """Whether workers of any group of this controller have started."""

    def __init__(self, run: TrainRunContext, resources: Mapping[str, float]) -> None:
        self._run, self._resources = run, dict(resources)
        self._groups: dict[int, PlacementGroup] = {}
        self._seconds_to_wait = float("inf")
        self.newcomers: Newcomers | None = None
        """Workers that start for a larger next group, or None."""
        self.is_kept = False
        """True while the places outlive their group."""

    def reserve(self, selectors: Sequence[Mapping[str, str] | None]) -> list[int]:
        """Request one more place per label selector, and return the numbers of the places."""
        added = {
            next(_numbers): placement_group(
                [self._resources], bundle_label_selector=[dict(selector)] if selector else None
            )
            for selector in selectors
        }
        self._groups |= added
        return list(added)

    def free(self, numbers: Iterable[int]) -> None:
        """Release places, which ends the processes that run in them."""
        for number in numbers:
            remove_placement_group(self._groups.pop(number))

    def start(self, numbers: Iterable[int]) -> dict[int, Any]:
        """Start a worker's process in each of these places; return the actors by place."""
        environment: Any = self._run.run_config.worker_runtime_env
        variables = {**get_env_vars_to_propagate(), **environment.get("env_vars", {})}
        actor_class: Any = ray.remote(
            runtime_env={**environment, "env_vars": variables},
            **bundle_to_remote_args(self._resources),
        )(RayTrainWorker)
        return {
            number: actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._groups[number], placement_group_bundle_index=0
                )
            ).remote()
            for number in numbers
        }

    def started(self, actors: Mapping[int, Any], *, seconds: float | None) -> list[Worker]:
        """Wait until these actors run, and return their workers.

        Args:
            actors: actors by place.
            seconds: time to wait; None waits for ever.

        Raises:
            WorkerGroupStartupFailedError: an actor has not started in time; all of them are killed.
            UserError: an actor of the first group cannot be made, so another one could not, either.
        """
        calls = [actor.get_metadata.remote() for actor in actors.values()]
        try:
            metadata_of_all = ray.get(calls, timeout=seconds)
        except ray.exceptions.RayError as error:
            for actor in actors.values():
                ray.kill(actor)
            # Once workers have started, only this node can be at fault, and another one may do.
            if (reason := creation_error(error)) and not WorkerPlaces.has_started:
                raise UserError(f"a worker cannot start: {reason}") from error
            raise WorkerGroupStartupFailedError("a worker's process did not start") from error
        WorkerPlaces.has_started = True
        return [
            Worker(actor, metadata, self._resources, placement_group_bundle_index=number)
            for (number, actor), metadata in zip(actors.items(), metadata_of_all, strict=True)
        ]

    def prepare(self, number: int, selector: Mapping[str, str] | None) -> bool | None:
        """Start this many workers for the next group while the present one trains.

        Returns:
            True once all have started; None if they got no resources in time and were given up.
        """
        if self.newcomers is None or len(self.newcomers.actors) != number:
            # The requested number has changed: start over.
            self.free(self.newcomers.actors if self.newcomers else ())
            actors = self.start(self.reserve([selector] * number))
            calls = [actor.get_metadata.remote() for actor in actors.values()]
            self.newcomers = Newcomers(actors, calls, time.monotonic())
        if self.newcomers.have_started:
            return True
        is_late = time.monotonic() - self.newcomers.since > _SECONDS_TO_PREPARE
        # Only missing resources count as late: a process may be slow to start.
        if not is_late or all(self._groups[place].wait(0) for place in self.newcomers.actors):
            return False
        self.free(self.newcomers.actors)
        self.newcomers = None
        return None

    def limit_wait(self) -> None:
        """Shorten the time to wait for further places: workers that stay are idle meanwhile."""
        self._seconds_to_wait = _SECONDS_TO_START

    @property
    def numbers(self) -> list[int]:
        """The numbers of all places, in the order in which they were reserved."""
        return list(self._groups)

    @property
    @override
    def placement_group(self) -> Any:
        return self  # Ray Train only passes it to `start_workers`

    @override
    def ready(self) -> Any:
        return [group.ready() for group in self._groups.values()]

    @override
    def wait(self, timeout_seconds: float = 30) -> bool:
        deadline = time.monotonic() + min(timeout_seconds, self._seconds_to_wait)
        return all(
            group.wait(max(0.0, deadline - time.monotonic())) for group in self._groups.values()
        )

    @override
    def shutdown(self) -> None:
        if not self.is_kept:
            self.free(self.numbers)


# -------------------------------------------------------------------- leaving a group, in a worker

_is_let_go = Event()


class ReleasedError(Exception):
    """The group has ended, and this process may serve in the next one."""


def join_group() -> None:
    """In a worker: reset the flags, as it now serves in a new group."""
    _is_let_go.clear()
    collectives_aborted.clear()


def wait_for_release(seconds: float) -> bool:
    """In a worker with no work left: return True if it has to leave within that time."""
    return _is_let_go.wait(seconds)


def leave_group(seconds: float) -> bool:
    """In a worker: wait for its training to end, and free all resources of its group.

    Args:
        seconds: time for the training thread to end.

    Returns:
        True if the process can serve in another group.
    """
    _is_let_go.set()
    if torch.cuda.is_available() and dist.is_initialized():
        # A collective of NCCL never ends by itself when a rank is lost. Gloo's fails as soon as
        # the last object of a process group is freed in the rank that it waits for.
        collectives_aborted.set()
        _abort_process_group()
    if not training_has_ended(seconds):
        return False
    if dist.is_initialized():
        dist.destroy_process_group()
    # Reference cycles would keep the model in memory.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return True


def free_frames(error: BaseException | None) -> None:
    """Free the objects that an error's frames refer to: model, stream, process groups."""
    while error:
        # Ray Train keeps the error, and with it the frames of the training thread.
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


# --------------------------------------------------- the group and its handover, in the controller


@dataclass(frozen=True)
class RemainingWorkers:
    """The remaining workers of a group, for the next one."""

    workers: Sequence[Worker]
    coming: Mapping[int, Any]
    """Actors that are starting, by the numbers of their places."""
    places: WorkerPlaces
    """Places of the workers and of the starting actors."""


class Handover(WorkerGroupCallback, ControllerCallback):
    """Keeps the workers of an ending group for the next one.

    All workers are started anew if no worker leaves the broken group in time, if it is unknown
    which worker failed, or if a different number of workers has to be placed by rules (tensor
    groups, stages of unequal speed).

    Args:
        policy: the scaling policy: says which nodes to avoid, and whether places follow rules.
    """

    def __init__(self, policy: GracefulScalingPolicy) -> None:
        self._policy = policy
        self._group: Any = None
        self._wanted = 0
        self._leaving: tuple[list[Worker], RemainingWorkers, bool] | None = None
        self._stayed: RemainingWorkers | None = None

    def take(self) -> RemainingWorkers | None:
        """Return the workers that the last group has left, once."""
        stayed, self._stayed = self._stayed, None
        return stayed

    @override
    def before_controller_execute_resize_decision(self, resize_decision: ResizeDecision) -> None:
        self._wanted = resize_decision.num_workers

    @override
    def after_worker_group_start(self, worker_group: Any) -> None:
        self._group, self._wanted = worker_group, 0

    @contextmanager
    @override
    def on_worker_group_shutdown(self) -> Iterator[None]:
        places = self._group.get_worker_group_state().placement_group_handle
        try:
            if self._wanted:  # else the run ends
                self._set_aside(places, self._wanted)
        except Exception as error:
            _logger.warning(f"restarting all workers: {error!r}")
            # Without their places all processes end.
            self._leaving, places.is_kept = None, False
        yield

    def _set_aside(self, places: WorkerPlaces, num_wanted: int) -> None:
        """Keep the workers that may stay out of Ray's shutdown, and start missing ones."""
        state, policy = self._group.get_worker_group_state(), self._policy
        workers: list[Worker] = list(state.workers)
        errors, ranks = _errors_by_rank(self._group), range(len(workers))
        leaving = {rank for rank in ranks if workers[rank].metadata.node_id in policy.avoided_nodes}
        failed = {rank for rank, error in errors.items() if not is_victim(error)}
        staying = [rank for rank in ranks if rank not in leaving | failed][:num_wanted]
        if not staying or (policy.places_by_rules and (num_wanted != len(workers) or leaving)):
            return
        places.is_kept = True
        # Ray shuts down, with seconds of patience, every worker that its state still names.
        state.workers.clear()
        # A failed worker is replaced in its own place, unless its node is leaving.
        replaced = sorted(failed - leaving)[: num_wanted - len(staying)]
        staying_workers = [workers[rank] for rank in staying]
        for rank in set(ranks).difference(staying):
            ray.kill(workers[rank].actor)
        places.free(_place(workers[rank]) for rank in set(ranks).difference(staying, replaced))
        coming = dict(places.newcomers.actors) if places.newcomers else {}
        places.newcomers = None
        coming |= places.start(set(places.numbers).difference(map(_place, staying_workers), coming))
        # Every error is a victim's: the cause is unknown, so if all workers answer, none is
        # trusted.
        is_unexplained = bool(errors) and len(staying_workers) == len(workers)
        self._leaving = staying_workers, RemainingWorkers((), coming, places), is_unexplained

    @override
    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Wait for the workers to leave the group."""
        if self._leaving is None:
            return
        # Not in `_set_aside`: only after Ray's shutdown are the streams closed that a worker may
        # wait for.
        (workers, rest, is_unexplained), self._leaving = self._leaving, None
        remaining = _wait_until_left(workers)
        rest.places.is_kept = False
        if not remaining or (is_unexplained and len(remaining) == len(workers)):
            rest.places.shutdown()
        else:
            self._stayed = RemainingWorkers(remaining, rest.coming, rest.places)


class StayingWorkerGroup(PlacedWorkerGroup):
    """A group of workers that takes over the processes of the previous group."""

    def __init__(
        self,
        train_run_context: TrainRunContext,
        worker_group_context: WorkerGroupContext,
        callbacks: Any = None,
    ) -> None:
        super().__init__(train_run_context, worker_group_context, callbacks)
        self._run, self._context = train_run_context, worker_group_context
        # Ray creates the group itself and passes only the callbacks.
        handovers = [each for each in callbacks or () if isinstance(each, Handover)]
        self._stayed = handovers[0].take() if handovers else None

    @override
    def reserve(self, context: WorkerGroupContext) -> WorkerPlaces:
        stayed, num_wanted = self._stayed, context.num_workers
        selectors: Any = context.label_selector or [None] * num_wanted
        if stayed is None:
            places = WorkerPlaces(self._run, context.resources_per_worker)
            places.reserve(selectors)
            return places
        places, missing = stayed.places, num_wanted - len(stayed.workers)
        free = [n for n in places.numbers if n not in {*map(_place, stayed.workers)}]
        # The old places may be too many or too few for the new group.
        places.free(free[missing:])
        places.reserve(selectors[: max(0, missing - len(free))])
        places.limit_wait()
        return places

    @override
    def start_workers(self, places: WorkerPlaces) -> list[Worker]:
        stayed = self._stayed
        if stayed is None:
            return places.started(places.start(places.numbers), seconds=None)
        missing = set(places.numbers).difference(map(_place, stayed.workers))
        coming = {n: actor for n, actor in stayed.coming.items() if n in missing}
        coming |= places.start(missing.difference(coming))
        started = places.started(coming, seconds=_SECONDS_TO_START)
        return sorted([*stayed.workers, *started], key=_place)


class TrainControllerWithHandover(TrainController):
    """Ray Train's controller, whose groups hand their workers over to the next one."""

    worker_group_cls = StayingWorkerGroup

    def __init__(self, *, scaling_policy: Any, callbacks: Sequence[Any], **arguments: Any) -> None:
        # Made here: Ray pickles every argument alone, and the two must share one policy.
        handover = Handover(scaling_policy)
        super().__init__(
            scaling_policy=scaling_policy, callbacks=[*callbacks, handover], **arguments
        )


def _errors_by_rank(group: Any) -> dict[int, Exception]:
    """Return the errors of a group's workers by rank, without Ray Train's wrappers."""
    status = group.get_latest_poll_status()
    errors = status.errors if status else {}
    return {rank: getattr(error, "health_check_failure", error) for rank, error in errors.items()}


def _place(worker: Worker) -> int:
    assert worker.placement_group_bundle_index is not None
    return worker.placement_group_bundle_index


def _wait_until_left(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers that have left their group in time; kill the others."""
    calls: dict[Any, Worker] = {
        worker.execute_async(leave_group, _SECONDS_TO_LEAVE): worker for worker in workers
    }
    done, late = ray.wait(list(calls), num_returns=len(calls), timeout=_SECONDS_TO_LEAVE + 1)
    killed = [calls[call] for call in late]
    for call in done:
        has_left = False
        with suppress(ray.exceptions.RayError):
            has_left = ray.get(call)
        if not has_left:
            killed.append(calls[call])
    for worker in killed:
        ray.kill(worker.actor)
    return [worker for worker in workers if worker not in killed]
