"""Storage that is full, read-only, slow or gone while a checkpoint is saved, all of it real."""

from __future__ import annotations

import os
import select
import socket
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import fsspec
import pytest
import torch
import torch.distributed as dist
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from torch import nn
from typing_extensions import override

from elastrata.checkpoints.commit import MARKER, find_newest_verified, list_commits
from elastrata.checkpoints.dcp_reader import METADATA
from elastrata.checkpoints.save import DurableSaver
from elastrata.checkpoints.state import ModelTensors, training_state
from elastrata_pipelines.storage import Storage

WIDTH = 128
SHARD = "__0_0.distcp"
FILES = [SHARD, METADATA, MARKER]
"""What a commit of one rank consists of, in the order of writing."""
PATIENCE_SECONDS = 120
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Fault = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Training:
    """A model that learns in this thread and is saved behind its back."""

    def __init__(self, storage: Storage) -> None:
        self.model = nn.Linear(WIDTH, WIDTH)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.steps = 0
        self.warnings: list[str] = []
        self.saver = DurableSaver(storage, keep_last=2, keep_best=False, warn=self.warnings.append)

    def step(self) -> None:
        before = self.model.weight.detach().clone()
        self.model(torch.ones(1, WIDTH)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        assert not torch.equal(before, self.model.weight)

    def save(self) -> None:
        state = training_state(self.model, self.optimizer)
        self.saver.save(state, step=self.steps, samples=self.steps, tokens=self.steps)


@dataclass
class Gate:
    """Holds a thread back before it creates a file of one name."""

    name: str = ""
    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def pass_through(self, name: str) -> None:
        if name == self.name:
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS)


@dataclass(frozen=True)
class GatedStorage(Storage):
    """Lets a test bring about a fault between two files of a checkpoint."""

    gate: Gate

    @override
    @contextmanager
    def create(self, *parts: str) -> Iterator[IO[bytes]]:
        self.gate.pass_through(parts[-1].rsplit("/", 1)[-1])
        with super().create(*parts) as stream:
            yield stream


def assert_survived(url: str, fault: Fault, before: str) -> None:
    """Trains and saves three times. In the second save the storage fails before a file is created,
    and is well again before the third."""
    gate = Gate()
    storage = GatedStorage(url, gate)
    training = Training(storage)
    training.step()
    training.save()
    training.saver.wait()
    assert training.warnings == []

    training.step()
    gate.name = before
    training.save()
    assert gate.reached.wait(PATIENCE_SECONDS)
    with fault():
        gate.opened.set()
        training.step()
        training.saver.wait()
    assert not training.saver.saving
    assert len(training.warnings) == 1
    assert training.warnings[0].startswith(
        "checkpoint of step 2 failed, training continues: rank 0:"
    )
    assert_newest(storage, 1)
    half_written = [name for name in storage.names() if name != list_commits(storage)[0].folder]
    assert len(half_written) == (before != SHARD)

    gate.name = ""
    training.save()
    training.saver.close()
    assert len(training.warnings) == 1
    assert_newest(storage, 3)
    assert_nothing_but_commits(storage, 3, 1)


def assert_newest(storage: Storage, step: int) -> None:
    newest = find_newest_verified(storage, pytest.fail)
    assert newest is not None
    assert newest.step == step


def assert_nothing_but_commits(storage: Storage, *steps: int) -> None:
    """The commits of these steps, the newest first, and not a file more."""
    found = list_commits(storage)
    assert [commit.step for commit in found] == list(steps)
    assert storage.names() == sorted(commit.folder for commit in found)
    for commit in found:
        assert storage.names(commit.folder) == sorted([*commit.files, MARKER])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of the test's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("pages", [1, 2])
@pytest.mark.parametrize("last", FILES)
def test_a_full_disk(disk: Path, last: str, pages: int) -> None:
    """There is room for the files before the last one, and for all of that one but a page or two.

    torch's own message about an early page is "unexpected pos".
    """
    storage = Storage(str(disk / "checkpoints"))
    training = Training(storage)
    training.step()
    training.save()
    training.saver.wait()
    fill(disk, but=max(0, pages_until(storage, last) - pages))

    training.step()
    training.save()
    training.step()
    training.saver.wait()
    (warning,) = training.warnings
    assert warning.startswith(
        "checkpoint of step 2 failed, training continues: rank 0: OSError: [Errno 28] No space "
        f"left on device: the disk mounted at {disk} has "
    )
    assert f"bytes free: '{storage.path()}/000000002-" in warning
    assert training.saver.is_disk_full
    assert_newest(storage, 1)
    assert_nothing_but_commits(storage, 1)

    (disk / "filler").unlink()
    training.save()
    training.saver.close()
    assert len(training.warnings) == 1
    assert not training.saver.is_disk_full
    assert_newest(storage, 3)
    assert_nothing_but_commits(storage, 3, 1)


def pages_until(storage: Storage, last: str) -> int:
    """Pages of the files of a commit, up to that one."""
    folder = list_commits(storage)[0].folder
    names = FILES[: FILES.index(last) + 1]
    return sum(-(-storage.size(folder, name) // PAGE_BYTES) for name in names)


def fill(disk: Path, *, but: int) -> None:
    """Leaves so many pages free."""
    stat = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(stat.f_bavail * stat.f_frsize - but * PAGE_BYTES))
    assert os.statvfs(disk).f_bavail == but


class Door(socketserver.ThreadingTCPServer):
    """The way to a server on this machine. Shut, it refuses connections and breaks those there are;
    the server behind keeps what it has."""

    allow_reuse_address = True
    allow_reuse_port = True  # the test holds the port, too
    daemon_threads = True

    def __init__(self, port: int, behind: int) -> None:
        super().__init__(("127.0.0.1", port), _Passage)
        self.behind = ("127.0.0.1", behind)
        self.passing: set[socket.socket] = set()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def shut(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in list(self.passing):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Passage(socketserver.BaseRequestHandler):
    server: Door

    @override
    def handle(self) -> None:
        self.server.passing.add(self.request)
        with suppress(OSError), socket.create_connection(self.server.behind) as server:
            other = {self.request: server, server: self.request}
            while True:
                for ready in select.select(list(other), [], [])[0]:
                    data = ready.recv(2**16)
                    if not data:
                        return
                    other[ready].sendall(data)

    @override
    def finish(self) -> None:
        self.server.passing.discard(self.request)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that refuses connections while no door listens at it, and that no one else gets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize("before", FILES)
def test_an_object_store_that_goes_away_and_comes_back(
    bucket: str, port: int, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    behind = urlsplit(os.environ["AWS_ENDPOINT_URL"]).port
    assert behind is not None
    door = Door(port, behind)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    @contextmanager
    def gone() -> Iterator[None]:
        nonlocal door
        door.shut()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        try:
            yield
        finally:
            door = Door(port, behind)

    try:
        assert_survived(f"{bucket}/run/checkpoints", gone, before)
    finally:
        door.shut()


class SlowFile(LocalFileOpener):
    @override
    def write(self, *args: Any, **kwargs: Any) -> Any:
        assert SlowFileSystem.goes_on.wait(PATIENCE_SECONDS)
        return super().write(*args, **kwargs)


class SlowFileSystem(LocalFileSystem):
    """A local disk whose writes wait for `goes_on`."""

    protocol = "slow"
    goes_on = threading.Event()

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    @override
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("slow://")))

    @override
    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "wb":
            return super()._open(path, mode, **options)
        self.makedirs(self._parent(path), exist_ok=True)
        return SlowFile(path, mode, fs=self)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Storage]:
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
    SlowFileSystem.goes_on.set()
    yield Storage(f"slow://{tmp_path}/checkpoints")
    SlowFileSystem.goes_on.set()


def test_a_slow_file_system_does_not_hold_training_up(slow: Storage) -> None:
    training = Training(slow)
    training.step()
    training.save()
    training.saver.wait()

    SlowFileSystem.goes_on.clear()
    training.step()
    training.save()
    saved = training.model.weight.detach().clone()
    for _ in range(5):
        training.step()
    assert training.saver.saving
    assert_newest(slow, 1)

    SlowFileSystem.goes_on.set()
    training.saver.close()
    assert not training.saver.saving
    assert training.warnings == []
    assert_newest(slow, 2)
    assert_nothing_but_commits(slow, 2, 1)
    assert_saved(slow, saved)


def assert_saved(storage: Storage, weight: torch.Tensor) -> None:
    """The newest commit holds the state as it was when the save began."""
    assert torch.equal(ModelTensors(storage, list_commits(storage)[0])["weight"], weight)
