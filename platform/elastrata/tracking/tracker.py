"""Tracking: one MLflow run per training run, written by the driver alone.

Nothing here may end a training run: a store that does not answer when the run starts is the
user's mistake; one that fails later is written to again and again, from a thread of its own.
"""

from __future__ import annotations

import getpass
import json
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field
from typing_extensions import override

from elastrata.config import Config
from elastrata.tracking.models import LoadableModel, Models
from elastrata.tracking.store import (
    experiment_of,
    find_run,
    opened,
    shown,
    tracking_uri,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import hide_secrets

_DIGEST_CHARACTERS = 36  # MLflow's own limit
_NOT_UNIQUE = "IntegrityError"
"""In what SQLAlchemy says of a row that another client has added meanwhile."""


@dataclass(frozen=True, kw_only=True)
class DataInput:
    """A data set that a run reads."""

    url: str
    """Absolute path or URL."""
    fingerprint: str
    samples: int
    tokens: int
    purpose: Literal["training", "evaluation"]


def data_inputs(inputs: Iterable[DataInput]) -> list[Any]:
    """The argument of `log_inputs`: each with its fingerprint as digest, cut, and whole in its
    profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return [
        DatasetInput(
            dataset=Dataset(
                name="/".join(data.url.rstrip("/").split("/")[-2:]),
                digest=data.fingerprint[:_DIGEST_CHARACTERS],
                source_type=urlsplit(data.url).scheme or "local",
                source=json.dumps({"uri": data.url}),
                profile=json.dumps(
                    {
                        "fingerprint": data.fingerprint,
                        "num_rows": data.samples,
                        "num_tokens": data.tokens,
                    }
                ),
            ),
            tags=[InputTag("mlflow.data.context", data.purpose)],
        )
        for data in inputs
    ]


def log_inputs(client: Any, run_id: str, inputs: Iterable[DataInput]) -> None:
    """Records what a run reads; what is recorded already stays as it is.

    MLflow's store looks whether it has a data set, and then adds it: of two runs that begin with
    the same one in the same moment, one is refused, and finds it there the next time.
    """
    if found := data_inputs(dict.fromkeys(inputs)):
        try:
            client.log_inputs(run_id, found)
        except Exception as error:  # the store's own, by any of its ways
            if _NOT_UNIQUE not in str(error):
                raise
            client.log_inputs(run_id, found)


_log = logging.getLogger(__name__)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0


class Outbox:
    """Runs actions one after the other in a thread of its own; a failed one is tried again.

    Args:
        what: what the actions do, for the warnings ("MLflow at http://...").
        is_hopeless: whether an action that failed so can never succeed; it is then dropped.
    """

    def __init__(self, what: str, is_hopeless: Callable[[Exception], bool]) -> None:
        self._what = what
        self._is_hopeless = is_hopeless
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object]) -> None:
        """Takes an action to run after all earlier ones. Returns at once."""
        with self._changed:
            self._waiting.append(action)
            self._changed.notify_all()

    def close(self, seconds: float) -> int:
        """Ends when all is done or `seconds` are over; returns how many actions are left."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, seconds)
            left = len(self._waiting)
        if not left:
            self._thread.join()
        return left

    def _run(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # whatever the library raises must not reach the run
                if not self._is_hopeless(error):
                    self._warn_once("does not answer; trying again", error)
                    self._pause(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
                    continue
                self._warn_once("refused a record", error)
            wait = _FIRST_WAIT_SECONDS
            with self._changed:
                self._waiting.popleft()
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _pause(self, seconds: float) -> None:
        with self._changed:
            if self._closing:
                self._changed.wait(_FIRST_WAIT_SECONDS)
            else:
                self._changed.wait_for(lambda: self._closing, seconds)

    def _warn_once(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s %s (%s)", self._what, what, _brief(error))


def _brief(error: Exception) -> str:
    lines = hide_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


Status = Literal["FINISHED", "FAILED", "KILLED"]
METRICS_PER_CALL, _PARAMS_PER_CALL, _TAGS_PER_CALL = 1000, 100, 100  # MLflow's own limits
_PARAM_CHARACTERS, _TAG_CHARACTERS = 6000, 5000
_SECONDS_TO_FINISH = 60.0
PARENT = "mlflow.parentRunId"
RUN_DIR = "run_dir"
"""The tag that names the folder of a run: its newest place."""
"""MLflow's tag that makes a run a part of another one."""
_HOPELESS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST", "INVALID_STATE"}


class TrackingConfig(Config):
    """Where the run is recorded."""

    uri: Annotated[str, Field(min_length=1)] | None = None
    """MLflow's tracking URI: `sqlite:///...`, `http(s)://...` or a database URL. Default: a SQLite
    database `mlflow.db` in the run's storage folder, where that is local."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "elastrata"
    """The MLflow experiment; made where it is missing."""


class Tracker:
    """The open record of one run. Its methods return at once and never raise.

    Made by `open_tracker`.
    """

    def __init__(
        self,
        client: Any,
        *,
        uri: str,
        run_id: str,
        run_name: str,
        experiment_id: str,
        inputs: Sequence[DataInput] = (),
        outbox: Outbox | None = None,
    ) -> None:
        self.uri = uri
        self.run_id = run_id
        self.run_name = run_name
        self.experiment_id = experiment_id
        self._client = client
        self._outbox = outbox or Outbox(f"MLflow at {shown(uri)}", _is_hopeless)
        self._last_steps: dict[str, int] | None = None
        self._inputs = inputs
        self._models = Models(client, uri=uri, experiment_id=experiment_id)

    def log_steps(self, records: Sequence[Mapping[str, float]]) -> None:
        """Logs metrics by optimizer step. A step that was logged before is not logged again.

        Args:
            records: each has a key `step`; all other keys are names of metrics.
        """
        now = int(time.time() * 1000)
        kept = [dict(record) for record in records]
        self._outbox.put(lambda: self._write_steps(kept, now))

    def tag(self, tags: Mapping[str, object]) -> None:
        """Sets tags; a tag that exists takes the new value."""
        kept = dict(tags)
        self._outbox.put(lambda: _set_tags(self._client, self.run_id, kept))

    def record_checkpoint(self, uri: str, step: int, metrics: Mapping[str, float]) -> None:
        """Records a checkpoint that lies at `uri` as an external model of the run, once."""
        self.tag({"checkpoint.latest": uri, "checkpoint.latest_step": step})
        kept = dict(metrics)
        self._outbox.put(
            lambda: self._models.record_checkpoint(self.run_id, self.run_name, uri, step, kept)
        )

    def record_output(self, uri: str, step: int) -> None:
        """Makes a recorded checkpoint what the run has led to."""
        self._outbox.put(lambda: self._models.log_output(self.run_id, uri, step))

    def register_checkpoint(self, uri: str, name: str) -> None:
        """Makes a recorded checkpoint the newest version of a model in MLflow's registry, once, and
        gives it the alias `best`. Only what can read checkpoints can load it."""

        def register() -> None:
            for model_id in self._models.recorded(self.run_id, uri)[:1]:
                self._models.register(self.run_id, model_id, uri, name, "best")

        self._outbox.put(register)

    def register_export(self, model: LoadableModel, name: str) -> None:
        """Keeps an export, makes it the newest version of a model in MLflow's registry, once, and
        gives it the alias `best`: MLflow loads it as `models:/NAME@best`. Its folder must stay
        until the record is finished."""

        def register() -> None:
            model_id = self._models.log_export(self.run_id, self.run_name, model)
            self._models.register(self.run_id, model_id, model.checkpoint, name, "best")

        self._outbox.put(register)

    def forget_checkpoint(self, uri: str) -> None:
        """Takes the record of a checkpoint that was deleted off the run."""
        self._outbox.put(lambda: self._models.forget(self.run_id, uri))

    def keep_checkpoints(self, uris: Collection[str]) -> None:
        """Takes the records of all checkpoints but these off the run."""
        kept = set(uris)
        self._outbox.put(lambda: self._models.keep(self.run_id, kept))

    def log_artifact(self, name: str, data: bytes, folder: str | None = None) -> None:
        """Adds a file of that name to the run's artifacts."""

        def log() -> None:
            with TemporaryDirectory() as scratch:
                path = Path(scratch) / name
                path.write_bytes(data)
                self._client.log_artifact(self.run_id, str(path), folder)

        self._outbox.put(log)

    def child(self, name: str, params: Mapping[str, object], tags: Mapping[str, object]) -> Tracker:
        """The record of a part of this run, found again by its name. The same thread writes both,
        so that a store which stands one writer holds with many parts; `finish` of the whole, which
        comes last, waits for all of them."""
        child = Tracker(
            self._client,
            uri=self.uri,
            run_id="",  # known when it is begun, which is before anything else is written
            run_name=f"{self.run_name}-{name}",
            experiment_id=self.experiment_id,
            outbox=self._outbox,
        )
        below = {PARENT: self.run_id, "mlflow.user": getpass.getuser()}

        def begin() -> None:
            filters = f"tags.`{PARENT}` = '{self.run_id}' and tags.`mlflow.runName` = '{name}'"
            found = self._client.search_runs([self.experiment_id], filters, max_results=1)
            run = found[0] if found else None
            if run is None:
                run = self._client.create_run(self.experiment_id, run_name=name, tags=below)
            child.run_id = run.info.run_id
            _log_params(self._client, run, params)
            _set_tags(self._client, child.run_id, tags)
            log_inputs(self._client, child.run_id, self._inputs)

        self._outbox.put(begin)
        return child

    def end(self, status: Status) -> None:
        """Sets the final status; waits for nothing."""
        self._outbox.put(lambda: self._client.set_terminated(self.run_id, status))

    def finish(self, status: Status) -> None:
        """Writes what is still to be written and the final status, in at most a minute."""
        self.end(status)
        left = self._outbox.close(_SECONDS_TO_FINISH)
        if left:
            _log.warning(
                "MLflow at %s does not answer: run %s lacks %d records and its final status %s",
                *(shown(self.uri), self.run_id, left - 1, status),
            )

    def _write_steps(self, records: Sequence[Mapping[str, float]], milliseconds: int) -> None:
        from mlflow.entities import Metric

        if self._last_steps is None:
            self._last_steps = _last_steps(self._client, self.run_id)
        last = dict(self._last_steps)
        metrics = []
        for record in records:
            step = int(record["step"])
            for name, value in record.items():
                if name != "step" and step > last.get(name, -1):
                    last[name] = step
                    metrics.append(Metric(name, float(value), milliseconds, step))
        for chunk in _chunks(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=chunk)
            self._last_steps |= {metric.key: metric.step for metric in chunk}


def open_tracker(
    config: TrackingConfig,
    storage: Storage,
    *,
    run_name: str,
    run_id: str | None,
    params: Mapping[str, object],
    tags: Mapping[str, object],
    inputs: Sequence[DataInput] = (),
    is_copy: Callable[[str], bool] = lambda folder: False,
) -> Tracker:
    """Starts the record of a run, or goes on with it.

    Creates database, experiment and run where they are missing. Parameters of MLflow cannot
    change: where a resumed run's differ they become tags `resumed.<parameter>`.

    Args:
        config: where to record.
        storage: the folder under which all runs lie; the default database lies in it.
        run_name: the run's name.
        run_id: the MLflow run to go on with. Where the store does not know it, a new run is made,
            tagged `continues_run`.
        params: the recipe as dotted paths.
        tags: facts about this start: commit, versions, fingerprint of the data.
        inputs: the data sets that it reads, and all parts of it.
        is_copy: whether this run is a copy of the one in the folder that it is called with, which
            the record has as `run_dir`; a copy gets an MLflow run of its own.

    Raises:
        UserError: the store cannot be reached or written, or the experiment is deleted.
    """
    uri = tracking_uri(config.uri, storage)
    with opened(uri) as client:
        experiment_id = experiment_of(client, config.experiment, uri)
        run = find_run(client, run_id)
        folder = run.data.tags.get(RUN_DIR) if run else None
        if run is None or (folder not in (None, tags.get(RUN_DIR)) and is_copy(folder)):
            run = client.create_run(experiment_id, run_name=run_name, tags=_first_tags(run_id))
        else:
            client.update_run(run.info.run_id, status="RUNNING", name=run_name)
        _log_params(client, run, params)
        _set_tags(client, run.info.run_id, tags)
        log_inputs(client, run.info.run_id, inputs)
    return Tracker(
        client,
        uri=uri,
        run_id=run.info.run_id,
        run_name=run_name,
        experiment_id=run.info.experiment_id,
        inputs=inputs,
    )


def _first_tags(earlier_run_id: str | None) -> dict[str, str]:
    user = {"mlflow.user": getpass.getuser()}
    return user | ({"continues_run": earlier_run_id} if earlier_run_id else {})


def _log_params(client: Any, run: Any, params: Mapping[str, object]) -> None:
    from mlflow.entities import Param

    run_id, known = run.info.run_id, run.data.params
    wanted = {name: str(value)[:_PARAM_CHARACTERS] for name, value in params.items()}
    new = [Param(name, value) for name, value in wanted.items() if name not in known]
    for chunk in _chunks(new, _PARAMS_PER_CALL):
        client.log_batch(run_id, params=chunk)
    changed = {name: value for name, value in wanted.items() if known.get(name, value) != value}
    _set_tags(client, run_id, {f"resumed.{name}": value for name, value in changed.items()})


def _last_steps(client: Any, run_id: str) -> dict[str, int]:
    """The last step logged of each metric. A crash may have cut a batch between two metrics."""
    return {
        name: max(metric.step for metric in client.get_metric_history(run_id, name))
        for name in client.get_run(run_id).data.metrics
    }


def _set_tags(client: Any, run_id: str, tags: Mapping[str, object]) -> None:
    from mlflow.entities import RunTag

    found = [RunTag(name, str(value)[:_TAG_CHARACTERS]) for name, value in tags.items()]
    for chunk in _chunks(found, _TAGS_PER_CALL):
        client.log_batch(run_id, tags=chunk)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _is_hopeless(error: Exception) -> bool:
    return getattr(error, "error_code", None) in _HOPELESS


class SilentTracker(Tracker):
    """Takes everything and does nothing."""

    def __init__(self) -> None:
        self.uri = self.run_id = self.run_name = self.experiment_id = ""

    @override
    def log_steps(self, records: Sequence[Mapping[str, float]]) -> None:
        pass

    @override
    def tag(self, tags: Mapping[str, object]) -> None:
        pass

    @override
    def record_checkpoint(self, uri: str, step: int, metrics: Mapping[str, float]) -> None:
        pass

    @override
    def record_output(self, uri: str, step: int) -> None:
        pass

    @override
    def register_export(self, model: LoadableModel, name: str) -> None:
        pass

    @override
    def register_checkpoint(self, uri: str, name: str) -> None:
        pass

    @override
    def forget_checkpoint(self, uri: str) -> None:
        pass

    @override
    def keep_checkpoints(self, uris: Collection[str]) -> None:
        pass

    @override
    def log_artifact(self, name: str, data: bytes, folder: str | None = None) -> None:
        pass

    @override
    def end(self, status: Status) -> None:
        pass

    @override
    def finish(self, status: Status) -> None:
        pass


_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""MLflow takes none of these in the name of a metric."""


def record_evaluation(
    config: TrackingConfig,
    storage: Storage,
    *,
    run_id: str | None,
    run_dir: str,
    step: int,
    metrics: Mapping[str, float],
) -> bool:
    """Adds metrics to a run's record.

    Args:
        config: which store.
        storage: the folder of the run's folder; a default database lies in it.
        run_id: of the run in MLflow.
        run_dir: the run's folder. A copy of the folder that the record names is another run.
        step: the checkpoint's.
        metrics: by name.

    Returns:
        Whether the store knows the run.

    Raises:
        UserError: the store cannot be reached or written.
    """
    if run_id is None:
        return False
    with opened(tracking_uri(config.uri, storage)) as client:
        run = find_run(client, run_id)
        if run is None or _is_elsewhere(run.data.tags.get(RUN_DIR), run_dir):
            return False
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        told = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(told), METRICS_PER_CALL):
            client.log_batch(run_id, metrics=told[first : first + METRICS_PER_CALL])
    return True


def _is_elsewhere(recorded: str | None, run_dir: str) -> bool:
    """Return whether the run on record still has its own folder, of which `run_dir` is a copy."""
    if recorded in (None, run_dir) or not (
        Storage(recorded).is_local and Storage(run_dir).is_local
    ):
        return False
    original = Path(recorded)
    return original.exists() and not original.samefile(run_dir)


def check_model_name(name: str) -> None:
    """Makes sure that MLflow's registry takes a name.

    Raises:
        UserError: it does not.
    """
    if not name.strip() or {"/", ":", "'"} & set(name):
        raise UserError(f"--register: {name!r}: expected a name without '/', ':' and quotes")


def register_export(
    config: TrackingConfig,
    storage: Storage,
    *,
    run_id: str | None,
    run_name: str,
    model: LoadableModel,
    name: str,
    alias: str | None,
) -> str:
    """Keeps an export and makes it the newest version of a registered model.

    Args:
        config: which store.
        storage: the folder of the run's folder; a default database lies in it.
        run_id: of the run in MLflow. Where the store does not know it, the model has no run.
        run_name: its name.
        model: the export.
        name: of the registered model.
        alias: moved to the new version; None: none is.

    Returns:
        The URI by which MLflow loads it: `models:/NAME/VERSION`, or `models:/NAME@ALIAS`.

    Raises:
        UserError: the store cannot be reached or written.
    """
    uri = tracking_uri(config.uri, storage)
    with opened(uri) as client:
        experiment_id = experiment_of(client, config.experiment, uri)
        run = find_run(client, run_id)
        where = run.info.experiment_id if run else experiment_id
        models = Models(client, uri=uri, experiment_id=where)
        of_run = run.info.run_id if run else ""
        model_id = models.log_export(of_run, run_name, model)
        version = models.register(of_run, model_id, model.checkpoint, name, alias)
    return f"models:/{name}@{alias}" if alias else f"models:/{name}/{version}"
