"""Ceph's S3 server, with users and rights: a monitor, a store in memory and a gateway."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from s3fs import S3FileSystem

from support.command import wait_until

_PROGRAMS = ("ceph-mon", "ceph-osd", "ceph", "monmaptool", "radosgw", "radosgw-admin")
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}/0]
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc
ms mon service mode = crc
ms mon cluster mode = crc
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
pid file =
mon data = {folder}/mon
mon allow pool size one = true
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {bytes}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
keyring = /dev/null
rgw data = {folder}
rgw frontends = beast endpoint=127.0.0.1:{gateway}
rgw run sync thread = false
"""
"""Nothing between these processes is guarded; the gateway's own users are."""
_STORE_BYTES = 2 * 2**30
BUCKET = "bucket"


class Ceph:
    """A server.

    Args:
        folder: for its files.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = ""
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Starts it; it then answers at `endpoint`."""
        monitor, gateway = _free_port(), _free_port()
        self.endpoint = f"http://127.0.0.1:{gateway}"
        fsid, folder = str(uuid.uuid4()), self._folder
        (folder / "ceph.conf").write_text(
            _CONFIGURATION.format(
                fsid=fsid, monitor=monitor, gateway=gateway, folder=folder, bytes=_STORE_BYTES
            ),
            encoding="utf-8",
        )
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        self._start_store(fsid, monitor)
        self._serve("radosgw", "-n", "client.gateway")
        wait_until(self._answers, 120, "the gateway")

    def add_user(self, name: str) -> Mapping[str, str]:
        """A user who may make buckets; what leads S3 clients there as this user."""
        key = secrets.token_hex(16)
        keys = ("--access-key", f"key-of-{name}", "--secret-key", key)
        self._call("radosgw-admin", "user", "create", "--uid", name, "--display-name", name, *keys)
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": f"key-of-{name}",
            "AWS_SECRET_ACCESS_KEY": key,
            "AWS_DEFAULT_REGION": "us-east-1",
            # Checksums of newer clients, which this server does not know.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
            "no_proxy": "127.0.0.1",
        }

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _start_store(self, fsid: str, monitor: int) -> None:
        address = f"[v2:127.0.0.1:{monitor}]"
        monmap = str(self._folder / "monmap")
        self._call("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap)
        self._call("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap)
        self._serve("ceph-mon", "-i", "a")
        number = self._call("ceph", "osd", "create").strip()
        (osd,) = json.loads(self._call("ceph", "osd", "dump", "--format", "json"))["osds"]
        self._call("ceph-osd", "-i", number, "--mkfs", "--osd-uuid", osd["uuid"])
        self._serve("ceph-osd", "-i", number)

    def _call(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [program, "-c", str(self._folder / "ceph.conf"), *arguments],
            capture_output=True,
            encoding="utf-8",
            cwd=self._folder,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _serve(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("wb") as out:
            process = subprocess.Popen(
                [program, "-c", str(self._folder / "ceph.conf"), "-f", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )
        self._processes.append(process)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def ceph() -> Iterator[Ceph]:
    """A server that is gone, with its files, when the block ends. Skips where it is not installed.

    The environment leads S3 clients to it, as the owner of `BUCKET`.
    """
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        pytest.skip(f"Ceph is not installed: {missing[0]} (Debian: radosgw ceph-mon ceph-osd)")
    folder = Path(tempfile.mkdtemp(prefix="ceph-", dir="/tmp"))  # sockets need short paths
    server = Ceph(folder)
    try:
        server.start()
        with user(server.add_user("owner")):
            S3FileSystem().mkdir(BUCKET)
            yield server
    finally:
        server.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def user(settings: Mapping[str, str]) -> Iterator[None]:
    """S3 clients of the block, and of processes that it starts, are this user's."""
    S3FileSystem.clear_instance_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(name, value)
        yield
    S3FileSystem.clear_instance_cache()


def _free_port() -> int:
    """Below those that the system gives to connections, which would take it before Ceph does."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
    raise AssertionError("no free port")


_given: set[int] = set()
