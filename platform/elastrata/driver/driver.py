"""The run driver: one process's part in a run, from the newest state to the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from elastrata.checkpoints.commit import Commit, find_newest_verified, list_commits
from elastrata.checkpoints.replicas.replicas import Replicas, close_replicas, open_replicas
from elastrata.cluster.channel import Receiver
from elastrata.cluster.failure_attribution import FailureCount
from elastrata.cluster.hang_trace import trace_prefix
from elastrata.cluster.job import Job
from elastrata.cluster.watchdog import Watchdog
from elastrata.driver.interrupt import Interrupt, shield_from_signals
from elastrata.driver.prometheus import Gauges
from elastrata.driver.recorder import Observer
from elastrata.recipe.recipe import Recipe
from elastrata.run import history
from elastrata.run.facts import flops_by_phase
from elastrata.run.folder import Parent
from elastrata.run.goodput import goodput, time_to_target
from elastrata.run.history import HistoryWriter
from elastrata.run.ownership import read_owner
from elastrata.run.pictures import publish_pictures
from elastrata.run.status import status as status_of
from elastrata.run.timeline import newest_known_step
from elastrata.step.events import (
    Action,
    ControllerLostError,
    ControlSignal,
    Event,
    Lost,
    TrainingError,
    Warned,
)
from elastrata.step.target import TargetConfig, is_over
from elastrata.tracking.tracker import Status, Tracker
from elastrata.trainer.preflight import TrainingData
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True)
class RunDriver:
    """One driver's part in a run."""

    recipe: Recipe
    run: Storage
    data: TrainingData
    tracker: Tracker
    channel: Any
    interrupt: Interrupt
    gpus: float
    show: Callable[[Event], None]
    parent: Parent | None = None

    def to_end(self, finished: bool) -> Status:
        """Train the remaining steps and record how the run ended.

        Args:
            finished: True if the run has reached its last step or target already.

        Returns:
            The status of the run.

        Raises:
            UserError: the workers refused the recipe or the data.
            TrainingError: training ended early.
            KeyboardInterrupt: a signal stopped the run.
        """
        entries = history.read_entries(self.run.sub("history"))
        number = history.next_attempt(self.run.sub("history"))
        writer = HistoryWriter(self.run.sub("history"), number, self._warn, writer="d")
        status: Status = "FAILED"
        text = ""
        try:
            if not finished:
                done = [step["step"] for step in history.effective_steps(entries)]
                observer = Observer(
                    self.tracker,
                    writer,
                    failures := FailureCount(self.recipe.workers.max_failures),
                    self._show_and_measure(),
                    history.world_sizes(entries),
                    step=newest_known_step(entries, max(done, default=0)),
                    substituted=[e["text"] for e in entries if e["kind"] == "substituted"],
                )
                self._fit(observer, failures, number)
            status = "FINISHED"
            self._record_target()
            self._record_flops()
            _publish(self.run, self.data, self.tracker, self.show)
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        except Exception as error:
            text = str(error)
            raise
        finally:
            if not self.interrupt.is_lost:  # else another driver owns run and record
                with shield_from_signals("closing the run's record"):
                    writer.add(
                        "ended", {"status": status, "text": text, **self._find_end_place(number)}
                    )
                    writer.flush()
                    self._report(status)
                    self.tracker.finish(status)
        return status

    def _find_end_place(self, number: int) -> dict[str, Any]:
        """Return the place in the run's history where this launch ends: its last attempt and its
        driver."""
        # Clocks of several machines would not order the launches.
        place: dict[str, Any] = {"last": number}
        with suppress(Exception):  # storage may be away
            place["last"] = max(number, history.next_attempt(self.run.sub("history")) - 1)
        with suppress(Exception):
            if owner := read_owner(self.run):
                place["driver"] = owner.token
        return place

    def _fit(self, observer: Observer, failures: FailureCount, number: int) -> None:
        recipe = self.recipe
        checkpoint = recipe.checkpoint
        replicas = open_replicas(checkpoint.hot_bytes) if checkpoint.hot_steps else None
        watchdog = Watchdog(
            recipe.workers.hang_seconds,
            lambda lost: observer([lost]),
            trace_prefix(self.run.uri()),
        )

        def handle(events: Sequence[Event]) -> None:
            watchdog.receive(events)
            observer(events)

        receiver = Receiver(self.channel, handle, self.interrupt.fail)
        try:
            try:
                self.interrupt.run(
                    lambda: self._run_controllers(
                        handle, failures, number, replicas, lambda: observer.attempt
                    ),
                    checkpoint.grace_seconds,
                    lambda name: request_stop(self.channel, name),
                )
            finally:
                # Closed before the error is examined: the last events may have the workers' reason.
                receiver.close()
        except TrainingError:
            # The workers' own reason is more precise than Ray's error.
            if observer.refused:
                raise UserError(*observer.refused) from None
            if self.interrupt.signal:
                raise KeyboardInterrupt(self.interrupt.signal) from None
            raise
        finally:
            watchdog.close()
            if replicas:
                close_replicas(replicas)
        if not is_finished(self.run, steps=recipe.steps_in_all, target=recipe.target):
            raise TrainingError(
                "the last checkpoint could not be saved; the same command repeats the steps "
                "since the previous one"
            )

    def _run_controllers(
        self,
        handle: Callable[[Sequence[Event]], None],
        failures: FailureCount,
        number: int,
        replicas: Replicas | None,
        attempt: Callable[[], int],
    ) -> None:
        """Run the job to its end; replace a controller that dies, which counts as a lost group.

        `attempt` returns the number of the newest group that has started.
        """
        # Imported late, as `launch._import_ahead` loads it while Ray starts.
        from elastrata.cluster.worker_group import run_job

        for controller in count():
            before = attempt()
            try:
                run_job(
                    self._job(replicas),
                    gpus_per_worker=self.gpus,
                    launch=f"launch-{number:04d}-{controller}",
                    max_failures=failures.left,
                )
            except ControllerLostError as error:
                # A signal may end the controller, too.
                if self.interrupt.signal or failures.is_last:
                    raise
                if controller and attempt() == before:
                    # The observer takes losses without a new group for the same one.
                    failures.lose_controller()
                handle([Lost(text=f"restarting Ray Train's controller: {error}", ranks=())])
            else:
                return

    def _show_and_measure(self) -> Callable[[Event], None]:
        """Return a function that shows an event and updates Ray's metrics."""
        entries = self.run.sub("history")
        name = self.run.uri().rpartition("/")[2]
        gauges = Gauges(name, lambda: goodput(history.read_entries(entries)))

        def show(event: Event) -> None:
            gauges(event)
            self.show(event)

        return show

    def _record_target(self) -> None:
        """Record when the run reached its target, or that it did not."""
        if self.recipe.target:
            entries = history.read_entries(self.run.sub("history"))
            outcome = time_to_target(entries, self.recipe.target)
            if outcome.step is not None:
                self.tracker.log_steps([{"step": outcome.step, **outcome.to_metrics()}])
            self.tracker.tag({"target": outcome})

    def _record_flops(self) -> None:
        """Record the FLOPs of each phase of a sparse run."""
        if any(part.sparsity for part in self.recipe.parts):
            steps = history.effective_steps(history.read_entries(self.run.sub("history")))
            phases = flops_by_phase(steps, [phase.last_step for phase in self.data.phases])
            self.tracker.log_steps(
                [{"step": phase.last_step, **phase.to_metrics()} for phase in phases]
            )

    def _job(self, replicas: Replicas | None) -> Job:
        return Job(
            recipe=self.recipe,
            run=self.run,
            phases=self.data.phases,
            held_out=self.data.evaluated,
            channel=self.channel,
            replicas=replicas,
            parent=self.parent,
        )

    def _report(self, status: Status) -> None:
        """Record the outputs and the report of the run, as in `elastrata status --json`."""
        checkpoints = self.run.sub("checkpoints")
        try:
            for commit in list_commits(checkpoints)[: int(status == "FINISHED")]:
                self.tracker.record_output(checkpoints.uri(commit.folder), commit.step)
            run_status = status_of(self.run)
            if run_status.steps:
                row = {"step": run_status.steps, **run_status.goodput.to_metrics()}
                self.tracker.log_steps([row])
            report = json.dumps(run_status.to_dict(), indent=1)
            self.tracker.log_artifact("report.json", report.encode())
        except Exception as error:  # a missing report does not fail the run
            self._warn(f"cannot write the report of the run: {error}")

    def _warn(self, line: str) -> None:
        self.show(Warned(text=line))


def request_stop(channel: Any, name: str) -> None:
    """Ask the workers to save and end, because of the signal of this name; do not wait."""
    channel.ask.remote(ControlSignal(action=Action.STOP, reason="stop", text=name))


def _publish(
    run: Storage, data: TrainingData, tracker: Tracker, show: Callable[[Event], None]
) -> None:
    """Draw and record the run's pictures; only warn if that fails."""
    try:
        publish_pictures(run, data.length_histogram, tracker)
    except Exception as error:
        show(Warned(text=f"cannot draw the plots of the run: {error}"))


def is_finished(run: Storage, *, steps: int, target: TargetConfig | None) -> bool:
    """Return True if the newest intact checkpoint is that of the last step, or has reached the
    target.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """

    def ends(commit: Commit) -> bool:
        return is_over(commit.step, commit.evaluation, steps=steps, target=target)

    checkpoints, lineage = run.sub("checkpoints"), history.read_lineage(run.sub("history"))
    if not any(
        ends(commit) for commit in list_commits(checkpoints) if lineage.counts(*commit.place)
    ):
        return False
    # No warnings about skipped checkpoints here: they are shown when training begins.
    newest = find_newest_verified(checkpoints, lambda _: None, lineage.counts)
    return newest is not None and ends(newest)
