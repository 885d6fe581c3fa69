"""The head process of a session (Ray's GCS): started again where it dies or hangs.

It knows nodes, actors and placement groups. Ray's other processes do without it for a minute, then
they end, the driver by an abort. With its tables in a file, one that is started within that minute
takes over, and nobody loses anything: no worker, no step.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any

import grpc  # type: ignore[import-untyped]
import ray

from elastrata.cluster.interrupt import undisturbed
from elastrata.cluster.ray_internals import check_alive, own_node

_USERS_CHOICE = ("RAY_gcs_storage", "RAY_REDIS_ADDRESS")
_STORE_BYTES = 64 * 2**20
"""Free bytes that the folder of the tables must have; they take a few megabytes."""
_SECONDS_BETWEEN_LOOKS = 0.25
_SECONDS_BETWEEN_CALLS = 5.0
_SECONDS_TO_ANSWER = 5.0
_SECONDS_TO_HANG = 30.0
"""Without an answer it is killed, early enough for the next one to be there within the minute."""
_DEATHS = 5
"""So many within a minute are survived."""
_MINUTE = 60.0


def settings(*places: Path) -> dict[str, str] | None:
    """Settings for `ray.init`, so that the tables outlive the process.

    Args:
        places: folders for the tables, the first with room is made and taken. Best in memory, as
            every change is synced, and no disk that is full can stop it there.
    """
    if any(name in os.environ for name in _USERS_CHOICE):
        return None
    for place in places:
        if place.parent.is_dir() and shutil.disk_usage(place.parent).free >= _STORE_BYTES:
            place.mkdir(mode=0o700)
            return {"gcs_storage": "rocksdb", "gcs_storage_path": str(place)}
    return None


@contextmanager
def kept_alive(environment: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Runs its block with the session that is open, and shuts that down.

    Args:
        environment: gives the context in which processes of the session are started.
    """
    head = _Head(own_node(), environment)
    try:
        yield
    finally:
        with undisturbed("ending Ray"):
            head.let_go()
            ray.shutdown()
            head.close()


class _Head:
    """Watches the head process of a node from a thread of its own."""

    def __init__(self, node: Any, environment: Callable[[], AbstractContextManager[None]]) -> None:
        self._node, self._environment = node, environment
        (self._process,) = (info.process for info in node.all_processes["gcs_server"])
        self._is_let_go = False
        self._deaths: list[float] = []
        self._asked = self._answered = time.monotonic()
        self._lock, self._ended = RLock(), Event()
        self._thread = Thread(target=self._watch, name="elastrata-head", daemon=True)
        self._thread.start()

    def let_go(self) -> None:
        """It may end from here on. It lives now: without it a shutdown would take a minute."""
        with self._lock:
            self._look()
            self._is_let_go = True

    def close(self) -> None:
        """To be called after the shutdown: Linux ends what a thread started together with it."""
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            with self._lock:
                self._look()

    def _look(self) -> None:
        if self._is_let_go or (self._process.poll() is None and not self._hangs()):
            return
        if ray.is_initialized():  # else this is a shutdown's doing, which says so before
            self._replace()

    def _hangs(self) -> bool:
        """Whether it has not answered for long; then it is killed."""
        now = time.monotonic()
        if now - self._asked < _SECONDS_BETWEEN_CALLS:
            return False
        if _answers(self._node.gcs_address):
            self._answered = time.monotonic()
        self._asked = time.monotonic()
        if self._asked - self._answered < _SECONDS_TO_HANG:
            return False
        self._process.kill()
        self._process.wait()
        return True

    def _replace(self) -> None:
        now, how = time.monotonic(), f"process {self._process.pid}{_death(self._process)}"
        self._deaths = [*(death for death in self._deaths if now - death < _MINUTE), now]
        if not _outlives_its_process(self._node) or len(self._deaths) > _DEATHS:
            self._is_let_go = True
            _say(
                f"the head process is gone ({how}), and cannot be replaced: Ray ends this command "
                "within a minute; the same command continues the run"
            )
            return
        try:
            with self._environment():
                self._node.kill_gcs_server(check_alive=False)  # it is dead, and is to be forgotten
                self._node.start_gcs_server()
        except Exception as error:  # tried again at the next look
            _say(f"the head process cannot be started ({type(error).__name__}: {error})")
            return
        (self._process,) = (info.process for info in self._node.all_processes["gcs_server"])
        self._asked = self._answered = time.monotonic()
        _say(f"the head process is gone ({how}); another one has taken over, nothing is lost")


def _answers(address: str) -> bool:
    try:
        check_alive(address, _SECONDS_TO_ANSWER)
    except grpc.RpcError as error:
        return error.code() not in (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            grpc.StatusCode.UNAVAILABLE,
        )
    return True


def _outlives_its_process(node: Any) -> bool:
    """Whether the tables are anywhere but in the process's memory."""
    return bool(node.redis_address) or node._resolve_ray_config("gcs_storage", "") == "rocksdb"


def _death(process: Any) -> str:
    code = process.returncode
    return f", {signal.Signals(-code).name}" if code < 0 else f", exit code {code}"


def _say(line: str) -> None:
    print(f"ray: {line}", file=sys.stderr, flush=True)
