"""Additions to the record of a run after its end: evaluations of its checkpoints, and exports as
versions of a model that MLflow loads by its name."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from elastrata.tracking.models import LoadableModel, Models
from elastrata.tracking.store import experiment_of, find_run, opened, tracking_uri
from elastrata.tracking.tracker import METRICS_PER_CALL, TrackingConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""MLflow takes none of these in the name of a metric."""


def record_evaluation(
    config: TrackingConfig,
    storage: Storage,
    *,
    run_id: str | None,
    step: int,
    metrics: Mapping[str, float],
) -> bool:
    """Adds metrics to a run's record.

    Args:
        config: which store.
        storage: the folder of the run's folder; a default database lies in it.
        run_id: of the run in MLflow.
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
        if find_run(client, run_id) is None:
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
