"""The tracking store: where MLflow keeps its records, whether it answers, and a client of it.

A SQLite database is made beside its place and renamed, so that no half of one is trusted. If
another program, or an earlier version, was killed while it made one, the half is set aside if
nothing was ever recorded in it, else refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import socket
import sqlite3
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import NO_SECRET, hide_secrets, without_secrets

_log = logging.getLogger(__name__)
_VERSION, _EXPERIMENTS = "alembic_version", "experiments"
_CORE = {_VERSION, _EXPERIMENTS, "runs", "metrics", "params", "tags"}
"""The tables that every version of MLflow has."""
_FILLED = {_VERSION, _EXPERIMENTS, "workspaces"}
"""The tables that MLflow fills when it makes a database."""
_NEW = ".new"
_SIDE_FILES = ("-journal", "-wal", "-shm")
_SECONDS_TO_WAIT = 5.0
_AGAIN = "restore a copy of it, or move it away: the next run makes a new one"


def check_database(path: Path) -> bool:
    """Make sure that a database is whole, or that nothing was ever recorded in it.

    Returns:
        Whether MLflow has made it to its end.

    Raises:
        UserError: it is damaged, or records are in it but not all of MLflow's tables.
        OSError: it cannot be opened.
        sqlite3.OperationalError: it cannot be read or written, as on a full or read-only disk.
    """
    try:
        with _locked(path) as database:
            tables = _tables(database)
            _check_end(database, path)
            if _is_made(database, tables):
                return True
            if _is_bare(database, tables):
                return False
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path}: cannot be reached: damaged, or no SQLite database ({error}); {_AGAIN}"
        ) from None
    missing = ", ".join(sorted(_CORE - tables)) or f"{_VERSION}'s or {_EXPERIMENTS}' rows"
    raise UserError(f"{path}: half of an MLflow database, without {missing}; {_AGAIN}")


def put_database(path: Path) -> None:
    """Put an empty database in a place where none is; one that is half-made and empty is set aside.
    Callers hold the lock of `store.alone`.

    Raises:
        UserError: see `check_database`; or it holds tables of another program.
        Exception: MLflow's and SQLAlchemy's own, as on a full disk; nothing is left then.
    """
    if path.exists():
        if check_database(path):
            return
        _check_own(path)
    _set_aside(path)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*{_NEW}*"):
        left.unlink()  # of a process that was killed: its lock is ours now
    # A new name each time: MLflow keeps the connection to one that it could not make.
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_NEW}")
    try:
        _make(new)
        try:
            os.link(new, path)  # never over one that another program has made meanwhile
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            new.replace(path)
    finally:
        _delete(new)


def _make(path: Path) -> None:
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    make: Any = SqlAlchemyStore  # MLflow does not say its types
    store = make(f"sqlite:///{path}", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()


def _check_own(path: Path) -> None:
    """Make sure that a database without records has no tables but MLflow's."""
    from mlflow.store.db.base_sql_model import Base

    with _locked(path) as database:
        foreign = sorted(_tables(database) - set(Base.metadata.tables))
    if foreign := [name for name in foreign if not name.lstrip("_").startswith("alembic_")]:
        raise UserError(
            f"{path}: a database of another program (tables {', '.join(foreign[:3])}): expected "
            "MLflow's, or a file that is not there"
        )


def _set_aside(path: Path) -> None:
    """Rename a half-made database, and say so. SQLite would play a journal that was left without
    one back into the new one."""
    found = [ending for ending in (*_SIDE_FILES, "") if os.path.lexists(f"{path}{ending}")]
    if not found:
        return
    aside, number = f"{path}.half-made", 1
    while any(os.path.lexists(f"{aside}{ending}") for ending in (*_SIDE_FILES, "")):
        number += 1
        aside = f"{path}.half-made-{number}"
    for ending in found:
        Path(f"{path}{ending}").rename(f"{aside}{ending}")
    _log.warning(
        "%s: what is left of an MLflow database, in which nothing was recorded, is now %s; a new "
        "one is made", path, aside,
    )  # fmt: skip


@contextmanager
def _locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database with the right to write; what a killed process left is rolled back."""
    with contextlib.closing(sqlite3.connect(path, timeout=_SECONDS_TO_WAIT)) as database:
        database.execute("BEGIN IMMEDIATE")
        yield database
        database.rollback()


def _check_end(database: sqlite3.Connection, path: Path) -> None:
    """SQLite itself finds whole pages missing, and takes the rest of a last one as zeros."""
    page_bytes = int(database.execute("PRAGMA page_size").fetchone()[0])
    if (size := path.stat().st_size) % page_bytes:
        raise sqlite3.DatabaseError(f"its {size:,} bytes end within a page")


def _tables(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in rows if not name.startswith("sqlite_")}


def _is_made(database: sqlite3.Connection, tables: set[str]) -> bool:
    """Return whether all is there. MLflow adds the default experiment last."""
    return tables >= _CORE and all(_rows(database, name) for name in (_VERSION, _EXPERIMENTS))


def _is_bare(database: sqlite3.Connection, tables: set[str]) -> bool:
    """Return whether nothing but the default experiment was ever recorded."""
    if any(_rows(database, name) for name in tables - _FILLED):
        return False
    others = "SELECT 1 FROM experiments WHERE experiment_id <> 0"
    return _EXPERIMENTS not in tables or database.execute(others).fetchone() is None


def _rows(database: sqlite3.Connection, table: str) -> bool:
    quoted = table.replace('"', '""')
    return database.execute(f'SELECT 1 FROM "{quoted}" LIMIT 1').fetchone() is not None


def _delete(path: Path) -> None:
    for ending in ("", *_SIDE_FILES):
        Path(f"{path}{ending}").unlink(missing_ok=True)


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
    if configured is not None and without_secrets(configured) != configured:
        raise UserError(f"tracking.uri: {without_secrets(configured)}: {NO_SECRET}")
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
    except UserError as error:
        raise UserError(*(f"tracking.uri: {line}" for line in error.problems)) from None
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be reached ({error})") from error


def _check_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # and must not for a moment: another process may be about to make it
        tempfile.TemporaryFile(dir=path.parent).close()
        return
    check_database(path)


def sqlite_path(uri: str) -> Path | None:
    """The file of a SQLite URI; None for any other store."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def artifact_location(uri: str) -> str | None:
    """A new experiment's folder of artifacts: beside a SQLite database; None: the server says."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlflow-artifacts").as_uri()


def shown(uri: str) -> str:
    """The URI without a user in it, and without secrets."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
    return without_secrets(uri)


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
            if path := sqlite_path(uri):
                put_database(path)
            return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except UserError as error:
        raise UserError(*(f"tracking.uri: {line}" for line in error.problems)) from None
    except Exception as error:  # a missing database driver, a broken URL, a full disk
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be used: {_reason(error)}") from error


@contextmanager
def opened(uri: str) -> Iterator[Any]:
    """A client of a store, for the time of its block.

    Raises:
        UserError: the store cannot be reached or written.
    """
    check_reachable(uri)
    client = quiet_client(uri)
    try:
        yield client
    except UserError:
        raise
    except Exception as error:  # MLflow lets through what SQLAlchemy, requests and drivers raise
        raise UserError(f"tracking.uri: {shown(uri)}: cannot be used: {_reason(error)}") from error


@contextmanager
def alone(uri: str) -> Iterator[None]:
    """Lets one process at a time make a SQLite store: several at once leave a broken one."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
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
        raise UserError(
            f"tracking.uri: {shown(uri)}: no MLflow answers there ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    lines = hide_secrets(str(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def experiment_of(client: Any, name: str, uri: str) -> str:
    """The id of an experiment; made where it is missing.

    Raises:
        UserError: it is deleted.
    """
    with alone(uri):
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
