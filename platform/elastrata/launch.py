"""The launch: one training run, from a recipe to its last checkpoint and its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import ray

from elastrata import history
from elastrata.commit import commits, newest_verified
from elastrata.ends import TrainingError
from elastrata.events import Committed, Event, Launched, Warned
from elastrata.facts import start_tags
from elastrata.history import HistoryWriter
from elastrata.hot import HotStorage, close_hot_tier, open_hot_tier
from elastrata.interrupt import Interrupt
from elastrata.job import Job
from elastrata.mailbox import Receiver, open_mailbox
from elastrata.observer import Observer, catch_up
from elastrata.ownership import DRIVER_FILE, Ownership, own_run, read_owner
from elastrata.phases import Phases
from elastrata.pictures import publish_pictures
from elastrata.preflight import TrainingData, check_storage, cluster_problems, training_data
from elastrata.ray_session import ray_session
from elastrata.recipe import Recipe
from elastrata.request import Act, Request
from elastrata.run_folder import (
    RunIdentity,
    check_same_run,
    flatten,
    read_identity,
    write_identity,
)
from elastrata.source import Source
from elastrata.tracking import Status, Tracker, open_tracker
from elastrata.watchdog import Watchdog
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """A finished run. The field names are the keys of `elastrata train --json`."""

    run_dir: str
    mlflow_run_id: str
    steps: int
    samples_seen: int
    tokens_seen: int
    final_loss: float
    world_sizes: list[int]
    """World size of every group of workers that took part, in order."""
    status: str


def train(
    recipe: Recipe,
    *,
    name: str,
    address: str | None = None,
    show: Callable[[Event], None],
) -> TrainResult:
    """Trains a recipe to its last step, or continues the run of that name from its newest state.

    Args:
        recipe: what to train.
        name: of the run; its folder in `recipe.storage`.
        address: the Ray cluster to join; default: the session that is open, else one of its own.
        show: called with every event, from a thread of its own.

    Raises:
        UserError: something in the recipe, the data or the cluster cannot work.
        TrainingError: training did not come to its end; says why.
    """
    phases = Phases()
    data = training_data(recipe)
    root = Storage(recipe.storage)
    check_storage(root)
    run = root.sub(name)
    interrupt = Interrupt()
    phases.passed("preflight")
    Thread(target=_import_ahead, daemon=True).start()
    with _owned(run, interrupt, show):
        identity = read_identity(run)
        if identity:
            check_same_run(run, identity, recipe, data.train.manifest.fingerprint)
        is_finished = _is_finished(run, recipe.steps)
        phases.passed("ownership")
        with ray_session(address):
            phases.passed("ray")
            gpus = _gpus_per_worker(recipe)
            if problems := cluster_problems(recipe, gpus, _cluster_resources()):
                raise UserError(*problems)
            mailbox = open_mailbox()
            tracker = _open_record(recipe, name, run, identity, data)
            phases.passed("record")
            show(Launched(seconds=phases.seconds))
            launch = _Launch(recipe, run, data, tracker, mailbox, interrupt, gpus, show)
            with interrupt.heard(lambda name: _ask_to_stop(mailbox, show, name)):
                status = launch.to_end(is_finished)
    return _result(run, tracker.run_id, status)


@contextmanager
def _owned(run: Storage, interrupt: Interrupt, show: Callable[[Event], None]) -> Iterator[None]:
    """Runs its block as the run's only driver. A run that was never begun leaves no folder."""
    ownership: Ownership | None = None
    before = read_owner(run)
    try:
        with own_run(
            run, lost=interrupt.lose, warn=lambda line: show(Warned(text=line))
        ) as ownership:
            if before and not before.released:
                _note_death(run, f"the driver is gone ({before})", show)
            yield
    finally:
        if ownership and not ownership.is_lost and run.names() == [DRIVER_FILE]:
            run.delete()


def _note_death(run: Storage, text: str, show: Callable[[Event], None]) -> None:
    """The fault that the driver before could not note: its own death."""

    def warn(line: str) -> None:
        show(Warned(text=line))

    storage = run.sub("history")
    writer = HistoryWriter(storage, history.next_attempt(storage) - 1, warn, writer="d")
    writer.add("fault", {"text": text, "ranks": []})
    writer.flush()


@dataclass(frozen=True)
class _Launch:
    """One driver's part in a run."""

    recipe: Recipe
    run: Storage
    data: TrainingData
    tracker: Tracker
    mailbox: Any
    interrupt: Interrupt
    gpus: float
    show: Callable[[Event], None]

    def to_end(self, is_finished: bool) -> Status:
        """Trains what is left, and records how it ended, whatever comes."""
        entries = history.read(self.run.sub("history"))
        number = history.next_attempt(self.run.sub("history"))
        writer = HistoryWriter(self.run.sub("history"), number, self._warn, writer="d")
        status: Status = "FAILED"
        text = ""
        try:
            if not is_finished:
                observer = Observer(self.tracker, writer, self.show, history.world_sizes(entries))
                self._fit(observer, number)
            status = "FINISHED"
            _publish(self.run, self.data, self.tracker, self.show)
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        except Exception as error:
            text = str(error)
            raise
        finally:
            if not self.interrupt.is_lost:  # else run and record are another driver's
                writer.add("ended", {"status": status, "text": text})
                writer.flush()
                self.tracker.finish(status)
        return status

    def _fit(self, observer: Observer, number: int) -> None:
        from elastrata.trainer import fit

        recipe = self.recipe
        hot = open_hot_tier(recipe.checkpoint.hot_bytes) if recipe.checkpoint.hot_steps else None
        watchdog = Watchdog(recipe.workers.hang_seconds, lambda lost: observer([lost]))

        def handle(events: Sequence[Event]) -> None:
            watchdog.hear(events)
            observer(events)

        receiver = Receiver(self.mailbox, handle)
        try:
            self.interrupt.run(
                lambda: fit(
                    self._job(hot), self._source(hot), gpus_per_worker=self.gpus, launch=number
                ),
                recipe.checkpoint.grace_seconds,
            )
        except TrainingError:
            receiver.close()
            if observer.refused:
                raise UserError(*observer.refused) from None
            if self.interrupt.signal:
                raise KeyboardInterrupt(self.interrupt.signal) from None
            raise
        finally:
            receiver.close()
            watchdog.close()
            if hot:
                close_hot_tier(hot)
        if not _is_finished(self.run, recipe.steps):
            raise TrainingError(
                "the last checkpoint could not be saved; the same command redoes the steps after "
                "the one before"
            )

    def _job(self, hot: HotStorage | None) -> Job:
        return Job(
            recipe=self.recipe,
            run=self.run,
            batches=self.data.train,
            held_out=self.data.held_out,
            mailbox=self.mailbox,
            hot=hot,
        )

    def _source(self, hot: HotStorage | None) -> Source:
        return Source(
            run=self.run,
            batches=self.data.train,
            steps=self.recipe.steps,
            batch_size=self.recipe.batch_size,
            mailbox=self.mailbox,
            hot=hot,
        )

    def _warn(self, line: str) -> None:
        self.show(Warned(text=line))


def _ask_to_stop(mailbox: Any, show: Callable[[Event], None], name: str) -> None:
    """Called in a signal's handler: only sends, and waits for nothing."""
    text = f"{name}: saving a checkpoint first; once more to stop at once"
    mailbox.ask.remote(Request(act=Act.STOP, reason="stop", text=name))
    show(Warned(text=text))


def _publish(
    run: Storage, data: TrainingData, tracker: Tracker, show: Callable[[Event], None]
) -> None:
    """A picture that cannot be drawn or written does not undo a finished run."""
    try:
        publish_pictures(run, data.train.manifest.length_histogram, tracker)
    except Exception as error:
        show(Warned(text=f"no pictures of the run: {error}"))


def _import_ahead() -> None:
    """Imports what is needed next while Ray starts, which leaves a core idle: saves 1 to 2 s."""

    import elastrata.trainer  # noqa: F401


def _cluster_resources() -> dict[str, float]:
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources


def _gpus_per_worker(recipe: Recipe) -> float:
    if recipe.workers.gpus == "auto":
        return 1.0 if _cluster_resources().get("GPU", 0) >= 1 else 0.0
    return recipe.workers.gpus


def _open_record(
    recipe: Recipe, name: str, run: Storage, identity: RunIdentity | None, data: TrainingData
) -> Tracker:
    """Starts the run's folder and its record, or goes on with them."""
    fingerprint = data.train.manifest.fingerprint
    tracker = open_tracker(
        recipe.tracking,
        Storage(recipe.storage),
        run_name=name,
        run_id=identity.mlflow_run_id if identity else None,
        params=flatten(recipe.model_dump(mode="json")),
        tags=start_tags(fingerprint, run.uri()),
    )
    now = RunIdentity(
        name=name,
        data=data.train.url,
        data_fingerprint=fingerprint,
        mlflow_run_id=tracker.run_id,
    )
    write_identity(run, now, recipe)
    if identity:
        catch_up(tracker, history.read(run.sub("history")), _committed(run.sub("checkpoints")))
    return tracker


def _committed(checkpoints: Storage) -> list[Committed]:
    """The checkpoints there are, the oldest first."""
    return [
        Committed(
            step=commit.step,
            uri=checkpoints.uri(commit.folder),
            evaluation_loss=commit.evaluation_loss,
        )
        for commit in reversed(commits(checkpoints))
    ]


def _is_finished(run: Storage, steps: int) -> bool:
    """Whether the newest whole checkpoint is that of the last step.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    newest = newest_verified(run.sub("checkpoints"), lambda _: None)  # told when training begins
    return newest is not None and newest.step >= steps


def _result(run: Storage, mlflow_run_id: str, status: str) -> TrainResult:
    entries = history.read(run.sub("history"))
    last: Mapping[str, Any] = history.effective_steps(entries)[-1]
    return TrainResult(
        run_dir=run.uri(),
        mlflow_run_id=mlflow_run_id,
        steps=last["step"],
        samples_seen=last["samples"],
        tokens_seen=last["tokens"],
        final_loss=last["loss"],
        world_sizes=history.world_sizes(entries),
        status=status,
    )
