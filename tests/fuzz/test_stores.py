"""Databases of MLflow, left at any moment of their making, and damaged: none but a whole one is
trusted, and none with records is set aside."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from elastrata.tracking import store
from elastrata.tracking.store import check_database, put_database
from support.mutations import seeds
from support.verdict import read_or_refused

CASES = 20
Statement = tuple[str, Any, bool]


@pytest.fixture(scope="module")
def statements(tmp_path_factory: pytest.TempPathFactory) -> list[Statement]:
    """What MLflow executes to make a database, in order."""
    found: list[Statement] = []

    def note(
        _connection: Any, _cursor: Any, text: str, values: Any, _context: Any, many: bool
    ) -> None:
        if not text.lstrip().upper().startswith(("SELECT", "PRAGMA")):
            found.append((text, values, many))

    path = tmp_path_factory.mktemp("whole") / "mlflow.db"
    event.listen(Engine, "before_cursor_execute", note)
    try:
        put_database(path)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert check_database(path)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where databases lie; a new one there is a copy of nothing, in no time."""
    monkeypatch.setattr(store, "_make", lambda new: new.write_bytes(b"new"))
    return tmp_path / "mlflow.db"


@pytest.mark.parametrize("seed", seeds())
def test_a_half_made_database(place: Path, statements: list[Statement], seed: int) -> None:
    rng = random.Random(seed)
    verdicts = [case(place, statements, rng, f"seed {seed}, case {n}") for n in range(CASES)]
    assert len(set(verdicts)) > 1, "all are told to be the same: nothing is tried"


def case(path: Path, statements: list[Statement], rng: random.Random, name: str) -> bool | None:
    for file in path.parent.iterdir():
        file.unlink()
    done = len(statements) if rng.random() < 0.15 else rng.randrange(len(statements))
    has_records, damage = (
        rng.random() < 0.3,
        rng.choice(("", "", "cut", "torn", "empty", "journal")),
    )
    name = f"{name}: {done} of {len(statements)}, records {has_records}, {damage}"
    has_records = begin(path, statements[:done], rng if has_records else None)
    is_cut = wreck(path, damage, rng)
    before = path.read_bytes()
    verdict = read_or_refused(lambda: check_database(path), name, str(path))
    assert verdict is not True or (done == len(statements) and not is_cut), name
    if has_records and damage != "empty" and done < len(statements):
        assert verdict is None, name
    if not has_records and done < len(statements) and not is_cut:
        assert verdict is False, name
    if verdict is False:
        put_database(path)
        assert path.read_bytes() == b"new", name
        assert (path.parent / "mlflow.db.half-made").exists(), name
    else:
        assert path.read_bytes() == before or damage == "journal", name
    return verdict


def begin(path: Path, statements: list[Statement], rng: random.Random | None) -> bool:
    """Execute statements; with `rng` records follow. Returns whether there are any."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA synchronous = OFF")
        database.execute("BEGIN")
        for text, values, many in statements:
            (database.executemany if many else database.execute)(text, values or ())
        is_recorded = rng is not None and record(database, rng)
        database.execute("COMMIT")
    return is_recorded


def record(database: sqlite3.Connection, rng: random.Random) -> bool:
    """Put a row into one of the tables that MLflow leaves empty."""
    names = [name for (name,) in database.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT IN "
        "('alembic_version', 'experiments', 'workspaces') AND name NOT LIKE 'sqlite_%'"
    )]  # fmt: skip
    database.execute("PRAGMA ignore_check_constraints = ON")
    for name in rng.sample(names, len(names)):
        columns = len(database.execute(f'PRAGMA table_info("{name}")').fetchall())
        with suppress(sqlite3.Error):
            values = ", ".join(["1"] * columns)
            database.execute(f'INSERT INTO "{name}" VALUES ({values})')
            return True
    return False


def wreck(path: Path, damage: str, rng: random.Random) -> bool:
    """Damage a database. Returns whether bytes of it are gone."""
    data = path.read_bytes()
    if damage == "cut" and data:
        path.write_bytes(data[: rng.randrange(len(data))])
    elif damage == "torn" and data:
        path.write_bytes(data[: -rng.randrange(1, 4096)])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "journal":
        for copied in leave_a_journal(path):
            shutil.move(copied, str(copied).replace(".copy", ""))
    return path.stat().st_size < len(data)


def leave_a_journal(path: Path) -> Iterator[Path]:
    """Copy a database in the middle of a transaction, with its journal, as a kill leaves them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA cache_size = 1")
        database.execute("PRAGMA cache_spill = 1")
        database.execute("BEGIN")
        database.execute("CREATE TABLE filler (text TEXT)")
        database.executemany("INSERT INTO filler VALUES (?)", [("x" * 3000,)] * 20)
        copies = [Path(shutil.copy(path, f"{path}.copy"))]
        if Path(f"{path}-journal").exists():
            copies.append(Path(shutil.copy(f"{path}-journal", f"{path}.copy-journal")))
        database.execute("ROLLBACK")
    yield from copies
