"""The tracking URI: where MLflow's store is, and whether it answers."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage

_DATABASES = ("postgresql", "mysql", "mssql")
_SECONDS_TO_ANSWER = 5.0
_SQLITE = "sqlite:///"


def tracking_uri(configured: str | None, storage: Storage) -> str:
    """The absolute tracking URI of a recipe.

    Args:
        configured: the recipe's `tracking.uri`.
        storage: the folder under which all runs lie; holds the default database.

    Raises:
        UserError: none is configured and the storage is remote, or it is not a URI MLflow knows.
    """
    if configured is None:
        if not storage.is_local:
            raise UserError(
                "tracking.uri: null: expected a URI such as http://HOST:5000, because storage "
                f"({storage.url}) is remote and a SQLite database needs a local folder"
            )
        return f"{_SQLITE}{Path(storage.path()).resolve() / 'mlflow.db'}"
    scheme = urlsplit(configured).scheme.split("+")[0]
    if scheme == "sqlite":
        path = configured.removeprefix(_SQLITE)
        if path == configured or not path:
            raise UserError(f"tracking.uri: {configured}: expected sqlite:///FILE")
        return f"{_SQLITE}{Path(path).resolve()}"
    if scheme in ("http", "https", *_DATABASES):
        return configured
    raise UserError(
        f"tracking.uri: {shown(configured)}: expected sqlite:///FILE, http(s)://HOST:PORT "
        f"or a database URL ({', '.join(_DATABASES)})"
    )


def check_reachable(uri: str) -> None:
    """Makes sure, in seconds, that the store answers. MLflow itself would try for minutes.

    Raises:
        UserError: it does not.
    """
    path = sqlite_path(uri)
    try:
        if path is not None:
            _check_sqlite(path)
        else:
            parts = urlsplit(uri)
            port = parts.port or {"http": 80, "https": 443, "mysql": 3306}.get(parts.scheme, 5432)
            host = parts.hostname or "localhost"
            socket.create_connection((host, port), _SECONDS_TO_ANSWER).close()
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be reached ({error})") from error


def _check_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # and must not for a moment: another process may be about to make it
        tempfile.TemporaryFile(dir=path.parent).close()
        return
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version").fetchall()
        database.execute("BEGIN IMMEDIATE")
        database.rollback()


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite URI; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def artifact_location(uri: str) -> str | None:
    """A new experiment's folder of artifacts: beside a SQLite database; None: the server says."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlflow-artifacts").as_uri()


def shown(uri: str) -> str:
    """The URI without a password in it."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
