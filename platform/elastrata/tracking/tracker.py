"""MLflow tracking: one MLflow run per training run, written by the driver alone.

A tracking failure never ends a training run. If the store does not answer when the run starts, that
is a user error; if it fails later, a background thread retries until it succeeds.
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
    open_client,
    redact_uri,
    tracking_uri,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import hide_secrets

_DIGEST_CHARACTERS = 36  # MLflow's own limit
_NOT_UNIQUE = "IntegrityError"
"""Part of SQLAlchemy's error if another client has inserted the same row meanwhile."""


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
    """Return the `datasets` argument of MLflow's `log_inputs`.

    The digest holds the start of the fingerprint, the profile all of it.
    """
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
    """Record the data sets that a run reads; existing records stay unchanged."""
    # MLflow first looks for a data set, then inserts it: of two runs that start with the same new
    # data set at the same moment, one gets an IntegrityError. Its second call finds the row.
    if dataset_inputs := data_inputs(dict.fromkeys(inputs)):
        try:
            client.log_inputs(run_id, dataset_inputs)
        except Exception as error:  # stores wrap SQLAlchemy's error in several types
            if _NOT_UNIQUE not in str(error):
                raise
            client.log_inputs(run_id, dataset_inputs)


_log = logging.getLogger(__name__)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 30.0


_DISK_FULL = "disk is full"
"""Part of SQLite's message."""


class Outbox:
    """Queue whose background thread runs actions in order and retries failed ones.

    Args:
        what: target of the actions, for warnings ("MLflow at http://...").
        is_hopeless: returns whether an action with this error can never succeed; it is then
            dropped.
    """

    def __init__(self, what: str, is_hopeless: Callable[[Exception], bool]) -> None:
        self._what = what
        self._is_hopeless = is_hopeless
        self._waiting: deque[Callable[[], object]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._is_stuck = False
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], object]) -> None:
        """Queue an action after all earlier ones, without waiting."""
        with self._changed:
            self._waiting.append(action)
            self._changed.notify_all()

    def close(self, seconds: float) -> int:
        """Wait until the queue is empty, at most `seconds`; not for a disk that is full.

        Returns:
            The number of actions that are left.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_stuck or not self._waiting, seconds)
            left = len(self._waiting)
        if not left:
            self._thread.join()
        return left

    def _run(self) -> None:
        wait = _FIRST_WAIT_SECONDS
        while (action := self._next()) is not None:
            try:
                action()
            except Exception as error:  # tracking errors must not end the run
                if not self._is_hopeless(error):
                    self._warn_once("does not answer; trying again", error)
                    if self._closing and _DISK_FULL in str(error):
                        with self._changed:
                            self._is_stuck = True
                            self._changed.notify_all()
                    self._pause(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
                    continue
                self._warn_once("refused a record", error)
            wait = _FIRST_WAIT_SECONDS
            with self._changed:
                # Removed only after success, so that `close` counts an action in flight as left.
                self._waiting.popleft()
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        """Return the oldest action, waiting for one; None once the closed queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            return self._waiting[0] if self._waiting else None

    def _pause(self, seconds: float) -> None:
        """Wait before the next try; `close` ends the wait."""
        with self._changed:
            # While closing, retry every second: `close` waits for a limited time.
            if self._closing:
                self._changed.wait(_FIRST_WAIT_SECONDS)
            else:
                self._changed.wait_for(lambda: self._closing, seconds)

    def _warn_once(self, what: str, error: Exception) -> None:
        # Warn once per kind of failure: an unreachable store fails at every retry.
        if what not in self._warned:
            self._warned.add(what)
            _log.warning("%s %s (%s)", self._what, what, _brief(error))


def _brief(error: Exception) -> str:
    # Errors of database drivers can contain the URL with its password.
    lines = hide_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


Status = Literal["FINISHED", "FAILED", "KILLED"]
METRICS_PER_CALL, _PARAMS_PER_CALL, _TAGS_PER_CALL = 1000, 100, 100  # MLflow's own limits
_PARAM_CHARACTERS, _TAG_CHARACTERS = 6000, 5000
_SECONDS_TO_FINISH = 60.0
PARENT = "mlflow.parentRunId"
"""MLflow's tag for the parent of a run."""
RUN_DIR = "run_dir"
"""Tag with the newest location of the run's folder."""
# MLflow's codes for requests that fail in the same way however often they are sent.
_HOPELESS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST", "INVALID_STATE"}


class TrackingConfig(Config):
    """Tracking of the run in MLflow."""

    uri: Annotated[str, Field(min_length=1)] | None = None
    """MLflow's tracking URI: `sqlite:///...`, `http(s)://...` or a database URL. Default: a SQLite
    database `mlflow.db` in the run's storage folder, if local."""
    experiment: Annotated[str, Field(min_length=1, max_length=500)] = "elastrata"
    """Name of the MLflow experiment; created if missing."""


class Tracker:
    """The open MLflow record of one run. Its methods return immediately and never raise.

    Create it with `open_tracker`.
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
        self._outbox = outbox or Outbox(f"MLflow at {redact_uri(uri)}", _is_hopeless)
        self._last_steps: dict[str, int] | None = None
        self._inputs = inputs
        self._models = Models(client, uri=uri, experiment_id=experiment_id)

    def log_steps(self, records: Sequence[Mapping[str, float]]) -> None:
        """Log metrics by optimizer step, skipping steps that were logged before.

        Args:
            records: each has a key `step`; all other keys are names of metrics.
        """
        now = int(time.time() * 1000)
        # Copied, because the caller may change them before the outbox runs.
        kept = [dict(record) for record in records]
        self._outbox.put(lambda: self._write_steps(kept, now))

    def tag(self, tags: Mapping[str, object]) -> None:
        """Set tags, replacing existing values."""
        kept = dict(tags)
        self._outbox.put(lambda: _set_tags(self._client, self.run_id, kept))

    def record_checkpoint(self, uri: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record the checkpoint stored at `uri` once, as an external model of the run."""
        self.tag({"checkpoint.latest": uri, "checkpoint.latest_step": step})
        kept = dict(metrics)
        self._outbox.put(
            lambda: self._models.record_checkpoint(self.run_id, self.run_name, uri, step, kept)
        )

    def record_output(self, uri: str, step: int) -> None:
        """Mark a recorded checkpoint as the output of the run."""
        self._outbox.put(lambda: self._models.log_output(self.run_id, uri, step))

    def register_checkpoint(self, uri: str, name: str) -> None:
        """Register a recorded checkpoint once as a model's newest version, with the alias `best`.

        Only software that reads Elastrata checkpoints can load it.
        """

        def register() -> None:
            # Empty if the store has refused the record of the checkpoint.
            for model_id in self._models.recorded(self.run_id, uri)[:1]:
                self._models.register(self.run_id, model_id, uri, name, "best")

        self._outbox.put(register)

    def register_export(self, model: LoadableModel, name: str) -> None:
        """Store an export and register it once as a model's newest version, with the alias `best`.

        MLflow loads it as `models:/NAME@best`. The folder of the export must exist until `finish`.
        """

        def register() -> None:
            model_id = self._models.log_export(self.run_id, self.run_name, model)
            self._models.register(self.run_id, model_id, model.checkpoint, name, "best")

        self._outbox.put(register)

    def forget_checkpoint(self, uri: str) -> None:
        """Remove the record of a deleted checkpoint from the run."""
        self._outbox.put(lambda: self._models.forget(self.run_id, uri))

    def keep_checkpoints(self, uris: Collection[str]) -> None:
        """Remove the records of all other checkpoints from the run."""
        kept = set(uris)
        self._outbox.put(lambda: self._models.keep(self.run_id, kept))

    def log_artifact(self, name: str, data: bytes, folder: str | None = None) -> None:
        """Add a file with this name to the run's artifacts."""

        def log() -> None:
            with TemporaryDirectory() as scratch:
                # MLflow names an artifact after its file.
                path = Path(scratch) / name
                path.write_bytes(data)
                self._client.log_artifact(self.run_id, str(path), folder)

        self._outbox.put(log)

    def child(self, name: str, params: Mapping[str, object], tags: Mapping[str, object]) -> Tracker:
        """Return the record of a part of this run, found again by its name after a restart.

        Parent and children share one outbox. `finish` of the parent waits for all of them, and must
        be called last.
        """
        child = Tracker(
            self._client,
            uri=self.uri,
            run_id="",  # set by `begin`, which runs before any other action of the child
            run_name=f"{self.run_name}-{name}",
            experiment_id=self.experiment_id,
            # SQLite allows one writer: a shared outbox serialises the writes of many parts.
            outbox=self._outbox,
        )
        child_tags = {PARENT: self.run_id, "mlflow.user": getpass.getuser()}

        def begin() -> None:
            filters = f"tags.`{PARENT}` = '{self.run_id}' and tags.`mlflow.runName` = '{name}'"
            # After a restart the child exists already: its parent and its name identify it.
            matches = self._client.search_runs([self.experiment_id], filters, max_results=1)
            run = matches[0] if matches else None
            if run is None:
                run = self._client.create_run(self.experiment_id, run_name=name, tags=child_tags)
            child.run_id = run.info.run_id
            _log_params(self._client, run, params)
            _set_tags(self._client, child.run_id, tags)
            log_inputs(self._client, child.run_id, self._inputs)

        self._outbox.put(begin)
        return child

    def end(self, status: Status) -> None:
        """Queue the final status, without waiting."""
        self._outbox.put(lambda: self._client.set_terminated(self.run_id, status))

    def finish(self, status: Status) -> None:
        """Write everything queued and the final status, waiting at most a minute."""
        self.end(status)
        # `left` includes the final status.
        left = self._outbox.close(_SECONDS_TO_FINISH)
        if left:
            _log.warning(
                "MLflow at %s does not answer: run %s is missing %d records and its final status "
                "%s",
                *(redact_uri(self.uri), self.run_id, left - 1, status),
            )

    def _write_steps(self, records: Sequence[Mapping[str, float]], milliseconds: int) -> None:
        from mlflow.entities import Metric

        if self._last_steps is None:
            # A restarted driver reads the recorded steps once, so that it logs none of them twice.
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
            # Updated after each chunk, so that a retry does not repeat chunks that were written.
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
    """Create or continue the MLflow record of a run.

    A missing database, experiment or run is created. MLflow parameters cannot change: values that
    differ in a resumed run become tags `resumed.<parameter>`.

    Args:
        config: the recipe's `tracking` section.
        storage: the folder that holds all runs, and the default database.
        run_name: the run's name.
        run_id: the MLflow run to continue. If the store does not know it, a new run is created with
            the tag `continues_run`.
        params: the recipe as dotted paths.
        tags: facts about this start: commit, versions, fingerprint of the data.
        inputs: the data sets that the run and all its parts read.
        is_copy: called with the recorded `run_dir`; returns whether this run is a copy of that
            folder. A copy gets a new MLflow run.

    Raises:
        UserError: the store cannot be reached or written, or the experiment is deleted.
    """
    uri = tracking_uri(config.uri, storage)
    with open_client(uri) as client:
        experiment_id = experiment_of(client, config.experiment, uri)
        run = find_run(client, run_id)
        folder = run.data.tags.get(RUN_DIR) if run else None
        # A folder that was moved keeps its MLflow run; a copy must not write into its original's.
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
    """Return the tags of a new MLflow run."""
    # The client API does not set the user, which MLflow's pages show.
    user = {"mlflow.user": getpass.getuser()}
    return user | ({"continues_run": earlier_run_id} if earlier_run_id else {})


def _log_params(client: Any, run: Any, params: Mapping[str, object]) -> None:
    """Log new parameters, and changed ones as tags `resumed.<parameter>`."""
    from mlflow.entities import Param

    run_id, recorded_params = run.info.run_id, run.data.params
    wanted = {name: str(value)[:_PARAM_CHARACTERS] for name, value in params.items()}
    new = [Param(name, value) for name, value in wanted.items() if name not in recorded_params]
    for chunk in _chunks(new, _PARAMS_PER_CALL):
        client.log_batch(run_id, params=chunk)
    changed = {
        name: value for name, value in wanted.items() if recorded_params.get(name, value) != value
    }
    _set_tags(client, run_id, {f"resumed.{name}": value for name, value in changed.items()})


def _last_steps(client: Any, run_id: str) -> dict[str, int]:
    """Return the last logged step of each metric."""
    return {
        # Per metric, because a crash may have interrupted a batch between two metrics.
        name: max(metric.step for metric in client.get_metric_history(run_id, name))
        for name in client.get_run(run_id).data.metrics
    }


def _set_tags(client: Any, run_id: str, tags: Mapping[str, object]) -> None:
    """Set tags in batches that MLflow accepts, truncating long values."""
    from mlflow.entities import RunTag

    run_tags = [RunTag(name, str(value)[:_TAG_CHARACTERS]) for name, value in tags.items()]
    for chunk in _chunks(run_tags, _TAGS_PER_CALL):
        client.log_batch(run_id, tags=chunk)


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _is_hopeless(error: Exception) -> bool:
    return getattr(error, "error_code", None) in _HOPELESS


class SilentTracker(Tracker):
    """A tracker that records nothing."""

    def __init__(self) -> None:
        # Without super().__init__(), which would start the outbox thread.
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
"""Characters that MLflow rejects in the name of a metric."""


def record_evaluation(
    config: TrackingConfig,
    storage: Storage,
    *,
    run_id: str | None,
    run_dir: str,
    step: int,
    metrics: Mapping[str, float],
) -> bool:
    """Add metrics to a run's record.

    Args:
        config: the recipe's `tracking` section.
        storage: the parent of the run's folder; holds the default database.
        run_id: id of the MLflow run.
        run_dir: the run's folder. If it is a copy of the recorded folder, nothing is added.
        step: step of the evaluated checkpoint.
        metrics: values by name.

    Returns:
        Whether the store knows the run.

    Raises:
        UserError: the store cannot be reached or written.
    """
    if run_id is None:
        return False
    with open_client(tracking_uri(config.uri, storage)) as client:
        run = find_run(client, run_id)
        if run is None or _is_elsewhere(run.data.tags.get(RUN_DIR), run_dir):
            return False
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        entries = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(entries), METRICS_PER_CALL):
            client.log_batch(run_id, metrics=entries[first : first + METRICS_PER_CALL])
    return True


def _is_elsewhere(recorded: str | None, run_dir: str) -> bool:
    """Return whether the recorded run's folder still exists and `run_dir` is a copy of it."""
    if recorded in (None, run_dir) or not (
        Storage(recorded).is_local and Storage(run_dir).is_local
    ):
        return False
    # A run that was moved has no folder at the recorded location.
    original = Path(recorded)
    return original.exists() and not original.samefile(run_dir)


def check_model_name(name: str) -> None:
    """Check that MLflow's registry accepts a name.

    Raises:
        UserError: the name is empty or contains '/', ':' or a quote.
    """
    if not name.strip() or {"/", ":", "'", '"'} & set(name):
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
    """Store an export and register it as the newest version of a model.

    Args:
        config: the recipe's `tracking` section.
        storage: the parent of the run's folder; holds the default database.
        run_id: id of the MLflow run. If the store does not know it, the model belongs to no run.
        run_name: the run's name.
        model: the export.
        name: name of the registered model.
        alias: alias to move to the new version; None: no alias is moved.

    Returns:
        The URI by which MLflow loads the model: `models:/NAME/VERSION`, or `models:/NAME@ALIAS`.

    Raises:
        UserError: the store cannot be reached or written.
    """
    uri = tracking_uri(config.uri, storage)
    with open_client(uri) as client:
        experiment_id = experiment_of(client, config.experiment, uri)
        run = find_run(client, run_id)
        where = run.info.experiment_id if run else experiment_id
        models = Models(client, uri=uri, experiment_id=where)
        of_run = run.info.run_id if run else ""
        model_id = models.log_export(of_run, run_name, model)
        version = models.register(of_run, model_id, model.checkpoint, name, alias)
    return f"models:/{name}@{alias}" if alias else f"models:/{name}/{version}"
