"""The Ray session of a command: it is its own, quiet, and gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastrata.cluster import ray_processes
from elastrata.cluster.ray_processes import Session, clear_away, read_mark
from elastrata.launch import doctor
from support.command import wait_until

OWN_AND_GONE = """
import os
import ray
from pathlib import Path
from elastrata.cluster.ray_processes import MARK, NICENESS
from elastrata.cluster.ray_session import ray_session

def folder():
    return Path(ray._private.worker._global_node.get_session_dir_path()).parent

def nice_of_a_worker():
    return ray.get(ray.remote(lambda: os.nice(0)).remote())

with ray_session(num_cpus=1):
    mine = folder()
    assert mine.name.startswith("ray-")
    assert nice_of_a_worker() == 0
    assert not {MARK, NICENESS} & os.environ.keys()
    with ray_session():
        assert ray.cluster_resources()["CPU"] == 1
    assert ray.is_initialized()
assert not ray.is_initialized()
assert not mine.exists()
assert not Path("/dev/shm", mine.name).exists()
os.environ[NICENESS] = "3"
try:
    with ray_session(num_cpus=1):
        mine = folder()
        assert nice_of_a_worker() == 3
        raise RuntimeError("broken")
except RuntimeError as error:
    assert error.__notes__ == [f"Ray's logs: {mine}/session_latest/logs"]
assert mine.exists()
import shutil
shutil.rmtree(mine)
"""


@pytest.mark.matrix  # two Rays, one after the other
def test_a_session_is_its_own_quiet_and_gone_afterwards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWN_AND_GONE], capture_output=True, encoding="utf-8"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_cluster_that_does_not_answer_is_told() -> None:
    code = """
from elastrata.cluster.ray_session import ray_session
with ray_session('127.0.0.1:1'): pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert "UserError: --address: 127.0.0.1:1: no Ray cluster answers there" in done.stderr


WAITING = """
import ray, sys
from elastrata.cluster.ray_session import ray_session

with ray_session(num_cpus=1):
    print(ray._private.worker._global_node.get_session_dir_path(), flush=True)
    for line in sys.stdin:
        print(ray.get(ray.remote(lambda: "done").remote()), flush=True)
"""


@contextmanager
def driver() -> Iterator[tuple[subprocess.Popen[str], Session]]:
    """A process with a session of its own, which runs a task for each line that it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip()).parent
    session = read_mark((folder / "elastrata-driver").read_text(encoding="utf-8"))
    assert session is not None
    try:
        yield process, session
    finally:
        process.kill()
        process.communicate()
        session.end()
        session.remove()


@pytest.mark.matrix
def test_a_driver_that_is_killed_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with driver() as (process, session):
        assert session.driver is not None
        assert session.driver.pid == process.pid
        assert session.driver.lives()
        assert len(session.processes()) >= 7
        with monkeypatch.context() as patch:  # as where the agents' titles have overwritten it
            patch.setattr(ray_processes, "_by_mark", lambda _: None)
            agents = {_command(pid).partition(b"\0")[0] for pid in session.processes()}
        assert {b"ray::DashboardAgent", b"ray::RuntimeEnvAgent"} <= agents
        clear_away(session.driver, print)
        assert session.folder.is_dir()
        process.kill()
        process.wait()
        # Deleted last, and by the guardian alone.
        wait_until(lambda: not session.memory.exists(), 60, "the guardian's end")
        assert session.processes() == []

        # Others' are not this test's to end.
        monkeypatch.setattr(doctor, "dead_sessions", lambda: {session: session.processes()})
        found = [(f.name, f.found) for f in doctor._leftovers(clean=False)]
        kept = f"of dead drivers: {session.folder} (elastrata doctor --clean deletes them)"
        assert found == [("ray's logs", kept)]
        assert len(list(doctor._leftovers(clean=True))) == 1
        assert not session.folder.exists()


@pytest.mark.matrix
def test_a_head_that_hangs_is_replaced() -> None:
    with driver() as (process, session):
        (head,) = (pid for pid in session.processes() if _is_head(pid))
        os.kill(head, signal.SIGSTOP)
        wait_until(lambda: not _is_head(head), 90, "its end")
        assert process.stdin is not None
        assert process.stdout is not None
        print("a task", file=process.stdin, flush=True)
        assert process.stdout.readline() == "done\n"
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0
        assert f"ray: the head process is gone (process {head}, SIGKILL)" in said


def _is_head(pid: int) -> bool:
    return b"/gcs_server" in _command(pid)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
