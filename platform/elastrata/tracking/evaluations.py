"""Evaluations of a run's checkpoints after its end: metrics of its record, at their steps."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from elastrata.tracking.store import check_reachable, find_run, quiet_client, shown, tracking_uri
from elastrata.tracking.tracker import TrackingConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
"""MLflow takes none of these in the name of a metric."""
_METRICS_PER_CALL = 1000


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
    uri = tracking_uri(config.uri, storage)
    check_reachable(uri)
    client = quiet_client(uri)
    try:
        if find_run(client, run_id) is None:
            return False
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        told = [
            Metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        for first in range(0, len(told), _METRICS_PER_CALL):
            client.log_batch(run_id, metrics=told[first : first + _METRICS_PER_CALL])
    except Exception as error:  # MLflow lets through what SQLAlchemy, requests and drivers raise
        reason = str(error).strip().splitlines()[0][:300]
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be used: {reason}") from error
    return True
