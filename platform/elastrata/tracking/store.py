"""The tracking store: the location of MLflow's records, checks that it answers, and a client.

A SQLite database is created under a temporary name and then linked into place, so that other
processes never see a partial one. A partial database that another program or an earlier version
left is moved aside if it holds no records, and refused otherwise.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import re
import sqlite3
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from tenacity import Retrying, retry_if_exception
from tenacity.stop import stop_after_delay
from tenacity.wait import wait_fixed

from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage
from elastrata_pipelines.url_secrets import NO_SECRET, hide_secrets, hide_unrecorded_parts
from elastrata_pipelines.waits import (
    READ_SECONDS,
    call_within,
    check_answers,
    check_port,
    waiting_for,
)

_log = logging.getLogger(__name__)
_VERSION, _EXPERIMENTS = "alembic_version", "experiments"
_CORE = {_VERSION, _EXPERIMENTS, "runs", "metrics", "params", "tags"}
"""Tables that every version of MLflow has."""
_FILLED = {_VERSION, _EXPERIMENTS, "workspaces"}
"""Tables into which MLflow inserts rows when it creates a database."""
_NEW = ".new"
_SIDE_FILES = ("-journal", "-wal", "-shm")
_SECONDS_BETWEEN_TRIES = 0.2
Result = TypeVar("Result")
_SECONDS_TO_WAIT = 1.0
"""SQLite's own wait for a lock, in which no signal is handled."""
SECONDS_FOR_A_LOCK = 300.0
"""Time to wait while another process holds the lock of a database."""
_WITH_SHARED_MEMORY = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs"}
"""File systems of one machine."""
_MOUNTS = Path("/proc/self/mounts")
_AGAIN = "restore a copy of it, or move it away: the next run makes a new one"


def check_database(path: Path) -> bool:
    """Check that a SQLite database is complete or holds no records.

    Returns:
        Whether MLflow created it completely.

    Raises:
        UserError: it is damaged, or holds records but lacks some of MLflow's tables.
        OSError: it cannot be opened.
        sqlite3.OperationalError: it cannot be read or written, as on a full or read-only disk.
    """
    try:
        with _open_locked(path) as database:
            tables = _tables(database)
            _check_size(database, path)
            if _is_complete(database, tables):
                return True
            # A process was killed while it created the database.
            if _is_empty(database, tables):
                return False
    # A subclass of DatabaseError, but about the disk or a lock, not about damage.
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise UserError(
            f"{path}: cannot be reached: damaged, or not a SQLite database ({error}); {_AGAIN}"
        ) from None
    missing = ", ".join(sorted(_CORE - tables)) or f"{_VERSION}'s or {_EXPERIMENTS}' rows"
    raise UserError(f"{path}: incomplete MLflow database, without {missing}; {_AGAIN}")


def ensure_database(path: Path) -> None:
    """Create an empty database, unless a complete one exists.

    A partial database without records is moved aside. The caller must hold the lock of `alone`.

    Raises:
        UserError: see `check_database`; or the database belongs to another program.
        Exception: any error of MLflow or SQLAlchemy, as on a full disk; no file is left then.
    """
    if path.exists():
        if check_database(path):
            return
        _check_no_foreign_tables(path)
    _move_aside(path)
    for leftover in path.parent.glob(f"{glob.escape(path.name)}.*{_NEW}*"):
        leftover.unlink()  # left by a killed process, as this process holds the lock
    # A new name each time, as MLflow keeps connections to databases that it failed to create.
    new_path = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_NEW}")
    try:
        _make(new_path)
        try:
            os.link(new_path, path)  # fails if another program created it meanwhile
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            # Atomic, but would replace a database that another program created meanwhile.
            new_path.replace(path)
    finally:
        _delete_database(new_path)


def _make(path: Path) -> None:
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    make: Any = SqlAlchemyStore  # not annotated in MLflow
    store = make(sqlite_uri(path), DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH)
    store.engine.dispose()


def _check_no_foreign_tables(path: Path) -> None:
    """Check that a database without records has no tables other than MLflow's."""
    from mlflow.store.db.base_sql_model import Base

    with _open_locked(path) as database:
        foreign = sorted(_tables(database) - set(Base.metadata.tables))
    # Alembic leaves such tables if a migration is interrupted.
    if foreign := [name for name in foreign if not name.lstrip("_").startswith("alembic_")]:
        raise UserError(
            f"{path}: a database of another program (tables {', '.join(foreign[:3])}): expected "
            "MLflow's, or a new file"
        )


def _move_aside(path: Path) -> None:
    """Rename a partial database and its side files, and log a warning."""
    endings = [ending for ending in (*_SIDE_FILES, "") if os.path.lexists(f"{path}{ending}")]
    if not endings:
        return
    aside, number = f"{path}.half-made", 1
    while any(os.path.lexists(f"{aside}{ending}") for ending in (*_SIDE_FILES, "")):
        number += 1
        aside = f"{path}.half-made-{number}"
    # Side files go first and with the same suffix: SQLite would replay a journal that is left
    # behind into the new database.
    for ending in endings:
        Path(f"{path}{ending}").rename(f"{aside}{ending}")
    _log.warning(
        "%s: an MLflow database without any records was incomplete and is now %s; a new "
        "one is created", path, aside,
    )  # fmt: skip


@contextmanager
def _open_locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a database with a write lock."""
    with closing(sqlite3.connect(path, timeout=_SECONDS_TO_WAIT)) as database:
        # Taking the write lock rolls back the transaction of a killed process.
        database.execute("BEGIN IMMEDIATE")
        yield database
        database.rollback()


def _check_size(database: sqlite3.Connection, path: Path) -> None:
    """Check that the file's size is a whole number of pages."""
    # SQLite detects missing whole pages, but reads the missing rest of a last page as zeros.
    page_bytes = int(database.execute("PRAGMA page_size").fetchone()[0])
    if (size := path.stat().st_size) % page_bytes:
        raise sqlite3.DatabaseError(f"its {size:,} bytes end within a page")


def _tables(database: sqlite3.Connection) -> set[str]:
    rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in rows if not name.startswith("sqlite_")}


def _is_complete(database: sqlite3.Connection, tables: set[str]) -> bool:
    """Return whether MLflow created the database completely."""
    # MLflow inserts the default experiment last, so its row shows that nothing is missing.
    return tables >= _CORE and all(_has_rows(database, name) for name in (_VERSION, _EXPERIMENTS))


def _is_empty(database: sqlite3.Connection, tables: set[str]) -> bool:
    """Return whether the database holds no record other than the default experiment."""
    if any(_has_rows(database, name) for name in tables - _FILLED):
        return False
    # Id 0 is the default experiment, which MLflow creates itself.
    others = "SELECT 1 FROM experiments WHERE experiment_id <> 0"
    return _EXPERIMENTS not in tables or database.execute(others).fetchone() is None


def _has_rows(database: sqlite3.Connection, table: str) -> bool:
    """Return whether a table has rows."""
    # SQLite cannot bind table names as parameters.
    quoted = table.replace('"', '""')
    return database.execute(f'SELECT 1 FROM "{quoted}" LIMIT 1').fetchone() is not None


def _delete_database(path: Path) -> None:
    for ending in ("", *_SIDE_FILES):
        Path(f"{path}{ending}").unlink(missing_ok=True)


_DATABASES = ("postgresql", "mysql", "mssql")
_PORTS = {"mysql": 3306, "mssql": 1433}
_SQLITE = "sqlite:///"


def tracking_uri(configured: str | None, storage: Storage) -> str:
    """Return the absolute tracking URI of a recipe.

    Args:
        configured: the recipe's `tracking.uri`.
        storage: the folder that holds all runs, and the default database.

    Raises:
        UserError: no URI is configured and the storage is remote, or MLflow does not know the URI.
    """
    if configured is not None and hide_unrecorded_parts(configured) != configured:
        raise UserError(f"tracking.uri: {hide_unrecorded_parts(configured)}: {NO_SECRET}")
    if configured is None:
        if not storage.is_local:
            raise UserError(
                "tracking.uri: null: expected a URI such as http://HOST:5000, because storage "
                f"({storage.url}) is remote and a SQLite database needs a local folder"
            )
        return sqlite_uri(Path(storage.path()).resolve() / "mlflow.db")
    # A database URL may name its driver, as in postgresql+psycopg2.
    scheme = urlsplit(configured).scheme.split("+")[0]
    if scheme == "sqlite":
        path = sqlite_path(configured)
        if path is None or "?" in configured:
            raise UserError(
                f"tracking.uri: {configured}: expected sqlite:///FILE, with %3F, %23 and %25 for "
                "?, # and % in the file's path"
            )
        return sqlite_uri(path.resolve())
    if scheme in ("http", "https", *_DATABASES):
        return configured
    raise UserError(
        f"tracking.uri: {redact_uri(configured)}: expected sqlite:///FILE, http(s)://HOST:PORT "
        f"or a database URL ({', '.join(_DATABASES)})"
    )


def check_reachable(uri: str) -> None:
    """Check that the store answers, within seconds.

    Raises:
        UserError: it does not answer.
    """
    path = sqlite_path(uri)
    try:
        if path is not None:
            wait_for_lock(path, lambda: _check_sqlite(path))
        else:
            parts = urlsplit(uri)
            scheme = parts.scheme.split("+")[0]
            # MLflow itself would retry for minutes.
            if scheme in ("http", "https"):
                check_answers(f"{scheme}://{parts.netloc.rpartition('@')[2]}/health")
            else:
                port = parts.port or _PORTS.get(scheme, 5432)
                check_port(parts.hostname or "localhost", port)
    except UserError as error:
        raise UserError(*(f"tracking.uri: {line}" for line in error.problems)) from None
    except (OSError, sqlite3.Error) as error:
        raise UserError(f"tracking.uri: {redact_uri(uri)}: cannot be reached ({error})") from error


def _check_sqlite(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():  # not created here, as another process may be creating it
        tempfile.TemporaryFile(dir=path.parent).close()
        return
    check_database(path)


def sqlite_uri(path: Path) -> str:
    """Return the URI of a SQLite database."""
    # SQLAlchemy takes `?` for the start of options, and decodes %20 and the like. Without the
    # driver's name, MLflow would also create the folder of the encoded path.
    encoded = re.sub("[%?#]", lambda found: f"%{ord(found[0]):02X}", str(path))
    return f"{_SQLITE if encoded == str(path) else 'sqlite+pysqlite:///'}{encoded}"


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a SQLite URI; None for any other store."""
    found = re.match(r"sqlite(?:\+pysqlite)?:///(.+)", uri)
    return Path(unquote(found[1])) if found else None


def artifact_location(uri: str) -> str | None:
    """Return the artifact folder of a new experiment; None if the server decides."""
    path = sqlite_path(uri)
    return None if path is None else (path.parent / "mlflow-artifacts").as_uri()


def redact_uri(uri: str) -> str:
    """Return a URI without user and secrets, for messages."""
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        uri = urlunsplit(parts._replace(netloc=parts.netloc.rsplit("@", 1)[1]))
    return hide_unrecorded_parts(uri)


def create_client(uri: str) -> Any:
    """Return MLflow's client for `uri`, without log output, telemetry and long retries.

    Raises:
        UserError: the store cannot be used.
    """
    # Set before the import below, at which MLflow may read its environment.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # The outbox retries by itself; MLflow's own retries would block it for minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # It logs the traceback of every error of the database, which its caller reports in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    try:
        with lock_store(uri), warnings.catch_warnings():
            # MLflow uses deprecated features of SQLAlchemy, which a user cannot change.
            warnings.simplefilter("ignore", DeprecationWarning)
            if path := sqlite_path(uri):
                wait_for_lock(path, lambda: ensure_database(path))
                _let_readers_write(path)
                make = partial(MlflowClient, tracking_uri=uri, registry_uri=uri)
                return _PatientClient(wait_for_lock(path, make), path)
            return MlflowClient(tracking_uri=uri, registry_uri=uri)
    except UserError as error:
        raise UserError(*(f"tracking.uri: {line}" for line in error.problems)) from None
    except Exception as error:  # a missing database driver, a broken URL, a full disk
        raise UserError(
            f"tracking.uri: {redact_uri(uri)}: cannot be used: {_reason(error)}"
        ) from error


class _PatientClient:
    """MLflow's client of a SQLite database, whose calls wait for the lock of another process."""

    def __init__(self, client: Any, path: Path) -> None:
        self._client, self._path = client, path

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._client, name)
        if not callable(member):
            return member
        # Each call is one transaction, so one that was refused has changed nothing.
        return lambda *args, **kwargs: wait_for_lock(self._path, lambda: member(*args, **kwargs))


def wait_for_lock(path: Path, call: Callable[[], Result]) -> Result:
    """Call a function, and repeat the call while another process holds a database's lock.

    Raises:
        Exception: any other error of the function, or that of the lock after five minutes.
    """
    with waiting_for(f"the database {path}"):
        return Retrying(
            retry=retry_if_exception(_is_locked),
            wait=wait_fixed(_SECONDS_BETWEEN_TRIES),
            stop=stop_after_delay(SECONDS_FOR_A_LOCK),
            reraise=True,
        )(call)


def _is_locked(error: BaseException) -> bool:
    # MLflow wraps the error of SQLAlchemy, which wraps SQLite's.
    return isinstance(error, BlockingIOError) or "database is locked" in str(error)


def _let_readers_write(path: Path) -> None:
    """Set the database's write-ahead log, with which readers and a writer do not wait for each
    other."""
    # Its index is shared memory, which processes of several machines do not have.
    try:
        mounts = [line.split() for line in os.fsdecode(_MOUNTS.read_bytes()).splitlines()]
    except OSError:  # not Linux
        return
    place = path.resolve()
    # Later mounts cover earlier ones; spaces are escaped.
    above = [
        (_unescape_mount(mount[1]), mount[2])
        for mount in reversed(mounts)
        if place.is_relative_to(_unescape_mount(mount[1]))
    ]
    if not above or max(above, key=lambda mount: len(mount[0]))[1] not in _WITH_SHARED_MEMORY:
        return
    # Another process may use the database now; a later run sets it.
    with suppress(sqlite3.OperationalError), closing(sqlite3.connect(path, timeout=0)) as database:
        database.execute("PRAGMA journal_mode=WAL")


def _unescape_mount(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


@contextmanager
def open_client(uri: str) -> Iterator[Any]:
    """Open a client of a store for the duration of the block.

    Raises:
        UserError: the store cannot be reached or written.
    """
    check_reachable(uri)
    client = create_client(uri)
    try:
        _check_mlflow(client, uri)
        yield client
    except UserError:
        raise
    except Exception as error:  # errors of SQLAlchemy, requests and drivers pass through MLflow
        raise UserError(
            f"tracking.uri: {redact_uri(uri)}: cannot be used: {_reason(error)}"
        ) from error


@contextmanager
def lock_store(uri: str) -> Iterator[None]:
    """Hold the lock for creating a SQLite store."""
    path = sqlite_path(uri)
    if path is None:
        yield
        return
    # Several processes that create one SQLite store at the same time leave a broken one.
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
        wait_for_lock(path, lambda: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB))
        yield


def check_store(uri: str) -> None:
    """Check that a store answers like MLflow, without creating a database.

    Raises:
        UserError: it does not.
    """
    check_reachable(uri)
    if sqlite_path(uri) is not None:
        return
    try:
        _check_mlflow(create_client(uri), uri)
    except UserError:
        raise
    except Exception as error:  # errors of SQLAlchemy, requests and drivers pass through MLflow
        raise UserError(
            f"tracking.uri: {redact_uri(uri)}: no MLflow server answers there ({_reason(error)})"
        ) from error


def _check_mlflow(client: Any, uri: str) -> None:
    """Ask a remote store one small question."""
    if sqlite_path(uri) is None:
        # Drivers of databases wait for ever for one that accepts connections and says nothing.
        seconds = max(READ_SECONDS, float(os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]))
        call_within(seconds, redact_uri(uri), lambda: client.search_experiments(max_results=1))


def _reason(error: Exception) -> str:
    # One line without secrets: errors of drivers can contain the URL with its password.
    lines = hide_secrets(str(error)).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def experiment_of(client: Any, name: str, uri: str) -> str:
    """Return the id of an experiment, creating it if it does not exist.

    Raises:
        UserError: the experiment is deleted.
    """
    with lock_store(uri):
        # Under the lock, or two runs could both create the experiment.
        found = client.get_experiment_by_name(name)
        if found is None:
            return str(client.create_experiment(name, artifact_location=artifact_location(uri)))
    if found.lifecycle_stage != "active":
        raise UserError(
            f"tracking.experiment: '{name}': deleted in {redact_uri(uri)}; restore it or name "
            "another"
        )
    return str(found.experiment_id)


def find_run(client: Any, run_id: str | None) -> Any:
    """Return a run, or None if the store has no active run with this id."""
    from mlflow.exceptions import MlflowException

    if run_id is None:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    # A deleted run still exists in the store, but cannot be written.
    return run if run.info.lifecycle_stage == "active" else None
