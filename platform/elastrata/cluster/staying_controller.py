"""Who stays: Ray Train's controller, whose groups hand their workers to the next one.

Where nobody can stay, all are started anew, as Ray Train does it: when none leaves the broken group
in time, when what is missing does not start in time, when nobody knows what was wrong with it, and
where another number of workers would have to be placed by rules (tensor groups, stages of unequal
speed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from elastrata.cluster.culprits import is_victim
from elastrata.cluster.ray_train_internals import SchedulingState, TrainController, WorkerGroup
from elastrata.cluster.staying_workers import Stayed, StayingWorkerGroup


class StayingController(TrainController):
    """Ray Train's controller, whose groups hand their workers to the next one where they can."""

    worker_group_cls: Any = StayingWorkerGroup

    @override
    def _start(self) -> None:
        policy: Any = self._scaling_policy
        policy.prepare = self._prepare
        super()._start()  # type: ignore[no-untyped-call]

    def _prepare(self, count: int, selector: Mapping[str, str] | None) -> bool | None:
        group: Any = self._worker_group
        found: bool | None = group.prepare(count, selector) if group else None
        return found

    @override
    def _shutdown_worker_group(self) -> None:
        group: Any = self._worker_group
        state: Any = self.get_state()
        policy: Any = self._scaling_policy
        is_starting = isinstance(self.get_state(), SchedulingState)
        wanted = state.scaling_decision.num_workers if is_starting else 0
        errors, count = _errors(group), len(group)
        nodes = [worker.metadata.node_id for worker in group.get_workers()]
        leaving = {rank for rank, node in enumerate(nodes) if node in policy.avoided}
        failed = {rank for rank, error in errors.items() if not is_victim(error)}
        staying = [rank for rank in range(count) if rank not in leaving | failed][:wanted]
        if not staying or (policy.places_by_rules and (wanted != count or leaving)):
            super()._shutdown_worker_group()  # type: ignore[no-untyped-call]
            return
        kept = sorted(failed - leaving)[: wanted - len(staying)]
        stayed = group.let_go(staying, set(range(count)).difference(staying, kept))
        self._worker_group = None
        if not stayed.workers or (errors and len(stayed.workers) == count):
            stayed.end()
        else:
            self.worker_group_cls = _TakingOver(stayed)

    @override
    def _start_worker_group(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._start_worker_group(*args, **kwargs)
        finally:
            self.worker_group_cls = StayingWorkerGroup


@dataclass(frozen=True)
class _TakingOver:
    """Makes a group, as the class does, that takes over what has stayed."""

    stayed: Stayed

    def create(self, **arguments: Any) -> StayingWorkerGroup:
        group = StayingWorkerGroup(**arguments)
        group.stayed = self.stayed
        group._start()  # type: ignore[no-untyped-call]
        return group


def _errors(group: WorkerGroup) -> dict[int, Exception]:
    """What ended its workers, by rank; Ray Train wraps what it finds when it looks at them."""
    status = group.get_latest_poll_status()
    errors = status.errors if status else {}
    return {rank: getattr(error, "health_check_failure", error) for rank, error in errors.items()}
