"""The registry: an export as a version of a model that MLflow loads by its name."""

from __future__ import annotations

from elastrata.tracking.models import LoadableModel, Models
from elastrata.tracking.store import (
    alone,
    check_reachable,
    experiment_of,
    find_run,
    quiet_client,
    shown,
    tracking_uri,
)
from elastrata.tracking.tracker import TrackingConfig
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


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
    check_reachable(uri)
    client = quiet_client(uri)
    try:
        with alone(uri):
            experiment_id = experiment_of(client, config.experiment, uri)
        run = find_run(client, run_id)
        where = run.info.experiment_id if run else experiment_id
        models = Models(client, uri=uri, experiment_id=where)
        of_run = run.info.run_id if run else ""
        model_id = models.log_export(of_run, run_name, model)
        version = models.register(of_run, model_id, model.checkpoint, name, alias)
    except UserError:
        raise
    except Exception as error:  # MLflow lets through what SQLAlchemy, requests and drivers raise
        reason = str(error).strip().splitlines()[0][:300]
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be used: {reason}") from error
    return f"models:/{name}@{alias}" if alias else f"models:/{name}/{version}"
