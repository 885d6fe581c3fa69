"""MLflow's SQLite database: made beside its place and renamed, so that no half of one is trusted.

A database that another program, or an earlier version, was killed in the middle of making is told
from one that holds records: it is set aside where nothing was ever recorded in it, else refused.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastrata_pipelines.errors import UserError

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
