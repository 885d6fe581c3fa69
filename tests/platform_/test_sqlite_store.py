"""MLflow's SQLite database: made whole or not at all, and half of one is never trusted."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from mlflow import MlflowClient

from elastrata.tracking import store
from elastrata.tracking.store import (
    check_store,
    experiment_of,
    open_client,
)
from elastrata_pipelines import waits
from elastrata_pipelines.errors import UserError
from support.command import wait_until
from support.deaf_servers import Serve, deaf_server, drip, fail, say_nothing
from support.empty_store import put_empty_store
from support.forks import fork, forks

RUNS = 3
Damage = Callable[[Path], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return put_empty_store(tmp_path / "runs")


@pytest.fixture
def made_at_once(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow takes seconds to make a database, always the same one."""
    template = shutil.copy(path, tmp_path / "template.db")
    monkeypatch.setattr(store, "_make", lambda new: shutil.copy(template, new))


def execute(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)


def record(uri: str) -> str:
    with open_client(uri) as client:
        return str(client.create_run(experiment_of(client, "here", uri)).info.run_id)


def recorded(path: Path) -> int:
    with closing(sqlite3.connect(path)) as database:
        return int(database.execute("SELECT count(*) FROM runs").fetchone()[0])


def no_bytes(path: Path) -> None:
    path.write_bytes(b"")


def no_version(path: Path) -> None:
    execute(path, "DELETE FROM alembic_version")


def no_table_of_versions(path: Path) -> None:
    execute(path, "DROP TABLE alembic_version")


def no_experiment(path: Path) -> None:
    execute(path, "DELETE FROM experiments")


def no_runs(path: Path) -> None:
    execute(path, "DROP TABLE runs")


def one_table(path: Path) -> None:
    path.unlink()
    execute(path, "CREATE TABLE experiments (experiment_id INTEGER)")


def journal_alone(path: Path) -> None:
    path.rename(f"{path}-journal")


def in_write_ahead_log(path: Path) -> None:
    """All that there is stands in the log, as a killed process leaves it."""
    path.unlink()
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE experiments (experiment_id INTEGER)")
    for ending in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{ending}", f"{path}.copy{ending}")
    database.close()
    for ending in ("", "-wal", "-shm"):
        Path(f"{path}.copy{ending}").rename(f"{path}{ending}")


HALVES = (
    *(no_bytes, no_version, no_table_of_versions, no_experiment, no_runs, one_table),
    *(journal_alone, in_write_ahead_log),
)


@pytest.mark.usefixtures("made_at_once")
@pytest.mark.parametrize("damage", HALVES)
def test_half_of_one_without_records_is_set_aside(
    path: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    damage(path)
    left = {file.read_bytes() for file in path.parent.glob("mlflow.db*")}
    record(f"sqlite:///{path}")
    (line,) = [message for message in caplog.messages if "mlflow.db" in message]
    assert "without any records" in line
    assert "mlflow.db.half-made" in line
    aside = {file.read_bytes() for file in path.parent.glob("mlflow.db.half-made*")}
    assert aside & left or damage is in_write_ahead_log
    assert recorded(path) == 1
    assert record(f"sqlite:///{path}")
    assert recorded(path) == 2
    assert not [*path.parent.glob("*.new*")]


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (no_version, "incomplete MLflow database, without alembic_version's"),
        (no_table_of_versions, "incomplete MLflow database, without alembic_version;"),
        (no_runs, "incomplete MLflow database, without runs;"),
        (lambda path: path.write_bytes(path.read_bytes()[:4096]), "cannot be reached: damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:100_001]), "cannot be reached: damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cannot be reached: damaged"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:50]),
            "cannot be reached: damaged, or not a SQLite database",
        ),
        (
            lambda path: path.write_text(
                "This is no database, but a text.\n" * 9, encoding="utf-8"
            ),
            "cannot be reached: damaged, or not",
        ),
    ],
)
def test_half_of_one_with_records_is_refused_and_stays(
    path: Path, damage: Damage, why: str
) -> None:
    uri = f"sqlite:///{path}"
    run = record(uri)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO tags VALUES ('key', 'value', ?)", (run,))
    damage(path)
    before = path.read_bytes()
    for use in (record, check_store):
        with pytest.raises(UserError) as caught:
            use(uri)
        (line,) = caught.value.problems
        assert line.startswith(f"tracking.uri: {path}: {why}")
        assert "move it away: the next run makes a new one" in line
    assert path.read_bytes() == before
    assert not [*path.parent.glob("*.half-made*")]


def made(folder: Path) -> int:
    """Bytes of the database that is being made; -1: none is."""
    return max((file.stat().st_size for file in folder.glob("mlflow.db.*.new")), default=-1)


@pytest.mark.matrix  # makes databases in many processes
@pytest.mark.parametrize("size", [0, 100_000, 500_000])
def test_a_kill_while_it_is_made(tmp_path: Path, size: int) -> None:
    path = tmp_path / "mlflow.db"
    process = fork(record, f"sqlite:///{path}")
    wait_until(lambda: made(tmp_path) >= size, 500, "it grows")
    process.kill()
    process.join()
    assert not path.exists()
    record(f"sqlite:///{path}")
    assert recorded(path) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"mlflow.db", "mlflow.db.lock"}


def record_together(uri: str, start: Barrier) -> None:
    MlflowClient  # noqa: B018 - imported before the start
    start.wait()
    record(uri)


@pytest.mark.matrix  # makes databases in many processes
@pytest.mark.parametrize("is_half", [False, True])
def test_runs_that_begin_together_record_in_one(tmp_path: Path, is_half: bool) -> None:
    path = tmp_path / "mlflow.db"
    if is_half:
        path.write_bytes(b"")
    start = forks().Barrier(RUNS, timeout=500)
    processes = [fork(record_together, f"sqlite:///{path}", start) for _ in range(RUNS)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * RUNS
    assert recorded(path) == RUNS
    assert len([*tmp_path.glob("*.half-made*")]) == is_half


HOLD = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.readline()
database.execute("COMMIT")
"""


@contextmanager
def held_by_another_process(path: Path) -> Iterator[Callable[[], None]]:
    """Another process holds the database's lock; yields what makes it let go."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        stdin = holder.stdin
        try:
            yield stdin.close
        finally:
            if not stdin.closed:
                stdin.close()


def test_a_start_waits_for_the_lock_of_another_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is let go when its wait has been reported."""
    reported = []
    monkeypatch.setattr(waits, "REPORT_SECONDS", 0.0)
    with held_by_another_process(path) as let_go:

        def report(what: str) -> None:
            reported.append(what)
            let_go()

        monkeypatch.setattr(waits, "report", report)
        with open_client(f"sqlite:///{path}") as client:
            assert client.create_experiment("another")
    assert reported[0] == f"the database {path}"


@pytest.mark.matrix  # SQLAlchemy waits for five seconds first
def test_each_call_of_a_client_waits_for_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_client(f"sqlite:///{path}") as client, held_by_another_process(path) as let_go:
        monkeypatch.setattr(waits, "REPORT_SECONDS", 6.0)  # after SQLAlchemy's own five seconds
        monkeypatch.setattr(waits, "report", lambda what: let_go())
        run = client.create_run("0", run_name="one")
    assert [found.info.run_id for found in client.search_runs(["0"])] == [run.info.run_id]


def test_a_lock_that_is_never_let_go_ends_a_start_with_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SECONDS_FOR_A_LOCK", 0.0)
    monkeypatch.setattr(store, "_SECONDS_TO_WAIT", 0.0)
    with held_by_another_process(path), pytest.raises(UserError) as error:
        check_store(f"sqlite:///{path}")
    line = f"tracking.uri: sqlite:///{path}: cannot be reached (database is locked)"
    assert error.value.problems == (line,)


def test_a_reader_and_a_writer_do_not_wait_for_each_other(path: Path) -> None:
    """A database that an earlier version made gets a write-ahead log, too."""
    execute(path, "PRAGMA journal_mode=DELETE")
    with open_client(f"sqlite:///{path}") as client, closing(sqlite3.connect(path)) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.execute("BEGIN")
        before = reader.execute("SELECT count(*) FROM experiments").fetchone()
        client.create_experiment("another")
        assert reader.execute("SELECT count(*) FROM experiments").fetchone() == before


def test_a_database_on_a_file_system_of_several_machines_has_no_shared_memory(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute(path, "PRAGMA journal_mode=DELETE")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"disk / ext4 rw 0 0\nserver:/ {path.parent} nfs4 rw 0 0\n", "utf-8")
    monkeypatch.setattr(store, "_MOUNTS", mounts)
    with open_client(f"sqlite:///{path}"), closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)


@pytest.mark.parametrize("serve", [say_nothing, drip, fail])
def test_a_tracking_server_that_does_not_answer(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "READ_SECONDS", 0.5)
    reported: list[str] = []
    monkeypatch.setattr(waits, "REPORT_SECONDS", 0.0)
    monkeypatch.setattr(waits, "report", reported.append)
    with deaf_server(serve) as port:
        uri = f"http://127.0.0.1:{port}"
        with pytest.raises(UserError) as error:
            check_store(uri)
    (line,) = error.value.problems
    assert line.startswith(f"tracking.uri: {uri}: cannot be reached (")
    assert uri in reported
