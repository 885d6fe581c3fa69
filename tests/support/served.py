"""A Ray cluster as people start one: `ray start`, with a dashboard and a token."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import yaml

from support.command import Command, kill_group, wait_until

BIN = Path(sys.executable).parent
_NODE = ("--node-ip-address=127.0.0.1", "--dashboard-agent-listen-port=0", "--block")
_KEPT = ("RAY_worker_niceness",)
"""A setting of this machine's, not of a cluster."""
_WORKERS = ("--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats")


class Served:
    """A head, where drivers run, and nodes that workers run on.

    Args:
        folder: for what Ray writes.
    """

    def __init__(self, folder: Path) -> None:
        self.token = secrets.token_hex(16)
        self._folder = folder
        self._port, dashboard, client, metrics = _free_ports(4)
        self.metrics_address = f"http://127.0.0.1:{metrics}/metrics"
        self.address = f"http://127.0.0.1:{dashboard}"
        self.gcs_address = f"127.0.0.1:{self._port}"
        self._processes: list[Command] = []
        self._autoscaling: dict[str, str] = {}
        self._head_ports = dashboard, client, metrics

    def start(self, launcher: dict[str, Any] | None = None) -> None:
        """Start the head and wait until its dashboard answers.

        Args:
            launcher: a file's values for Ray's autoscaler, which then starts and stops the nodes.
        """
        dashboard, client, metrics = self._head_ports
        self._start(
            *self._launched_by(launcher or {}),
            *("--head", f"--port={self._port}", "--num-cpus=0"),
            *("--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
            *(f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}"),
        )
        wait_until(self._answers, 600, "the dashboard")

    @property
    def environment(self) -> dict[str, str]:
        """What a client of the cluster has in its environment."""
        return client_environment(self.settings)

    @property
    def settings(self) -> dict[str, str]:
        """What lets a client in."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def add(self, cpus: int) -> None:
        """One more node."""
        self._start(
            *(f"--address={self.gcs_address}", f"--num-cpus={cpus}"),
            f"--object-store-memory={128 * 2**20}",
        )

    def nodes(self) -> list[dict[str, Any]]:
        """What Ray says of every node, dead ones too."""
        found = json.loads(self._get("/api/v0/nodes?detail=1&limit=1000"))
        nodes: list[dict[str, Any]] = found["data"]["result"]["result"]
        return nodes

    def close(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                kill_group(process)

    def _start(self, *arguments: str) -> None:
        """A node with files of its own, as on another machine: nodes that share a folder take the
        shipped packages away from one another."""
        number = len(self._processes)
        own = self._folder / str(number)
        log = self._folder / f"node-{number}.log"
        process = Command(
            ["start", *arguments, *_NODE, *_WORKERS, f"--temp-dir={own}"],
            log,
            log,
            own_group=True,
            program="ray",
            environment={**self.environment, **self._autoscaling},
        )
        self._processes.append(process)

    def _launched_by(self, launcher: dict[str, Any]) -> Sequence[str]:
        """As `cluster_configs/raylets.yaml` says."""
        if not launcher:
            return ()
        head = launcher["provider"]["head_node_id"]
        self._autoscaling = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_NODE_TYPE_NAME": launcher["head_node_type"],
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head,
            "RAY_CLOUD_INSTANCE_ID": head,
        }
        provider = {**launcher["provider"], "gcs_address": self.gcs_address}
        file = self._folder / "launcher.yaml"
        file.write_text(yaml.safe_dump({**launcher, "provider": provider}), encoding="utf-8")
        return (f"--autoscaling-config={file}",)

    def _answers(self) -> bool:
        try:
            self._get("/api/jobs/")
        except (URLError, OSError):
            return False
        return True

    def _get(self, path: str) -> bytes:
        headers = {"Authorization": f"Bearer {self.token}"}
        with urlopen(Request(f"{self.address}{path}", headers=headers), timeout=30) as answer:
            found: bytes = answer.read()
        return found


@contextmanager
def served(launcher: dict[str, Any] | None = None) -> Iterator[Served]:
    """A cluster that is gone, with its files, when the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="served-", dir="/tmp"))  # sockets need short paths
    cluster = Served(folder)
    try:
        cluster.start(launcher)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def client_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, without what it may know of another cluster."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name in _KEPT
    }
    return {**own, "PATH": f"{BIN}{os.pathsep}{own['PATH']}", **changes}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
