"""MLflow's client: silent, quick to give up, and alone where it makes a database."""

from __future__ import annotations

import fcntl
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from elastrata.tracking.uri import artifact_location, check_reachable, shown, sqlite_path
from elastrata_pipelines.errors import UserError


def quiet_client(uri: str) -> Any:
    """MLflow's client for `uri`, silent, without usage reports, and quick to give up."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # The outbox tries again by itself; MLflow's own retries would block it for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    try:
        with alone(uri), warnings.catch_warnings():
            # MLflow's own models use what SQLAlchemy deprecates: nothing a user can change.
            warnings.simplefilter("ignore", DeprecationWarning)
            return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except Exception as error:  # a missing database driver, a broken URL
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be used: {error}") from error


@contextmanager
def alone(uri: str) -> Iterator[None]:
    """Lets one process at a time make a SQLite store: several at once leave a broken one."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_store(uri: str) -> None:
    """Makes sure that a store answers as MLflow. Makes no database.

    Raises:
        UserError: it does not.
    """
    check_reachable(uri)
    if sqlite_path(uri) is not None:
        return
    try:
        quiet_client(uri).search_experiments(max_results=1)
    except UserError:
        raise
    except Exception as error:  # MLflow lets through what SQLAlchemy, requests and drivers raise
        reason = str(error).strip().splitlines()[0][:300]
        raise UserError(
            f"tracking.uri: {shown(uri)}: no MLflow answers there ({reason})"
        ) from error


def experiment_of(client: Any, name: str, uri: str) -> str:
    """The id of an experiment; made where it is missing.

    Raises:
        UserError: it is deleted.
    """
    found = client.get_experiment_by_name(name)
    if found is None:
        return str(client.create_experiment(name, artifact_location=artifact_location(uri)))
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: '{name}': deleted in {shown(uri)}; restore it or name another"
        )
    return str(found.experiment_id)


def find_run(client: Any, run_id: str | None) -> Any:
    """A run; None where the store does not know it."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None
