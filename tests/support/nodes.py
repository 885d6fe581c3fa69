"""Several Ray nodes on this machine, each a raylet of its own, that come and go. Forked workers
would be those of their first driver alone; so these have Ray's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from support.forked_workers import forked_workers, own_workers
from support.shared_ray import close_ray

RAY = str(Path(sys.executable).with_name("ray"))


class Nodes:
    """A head without CPUs, where drivers run, and nodes that workers run on."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        arguments = {"num_cpus": 0, "include_dashboard": False, "temp_dir": folder}
        with own_workers(), forked_workers(), pytest.MonkeyPatch.context() as patch:
            # `Cluster` writes the head's address into Ray's default folder, and fails if no Ray has
            # made that folder before: so this cluster's own folder is the default.
            Path(folder, "ray").mkdir()
            patch.setenv("RAY_TMPDIR", folder)
            self._cluster = Cluster(initialize_head=True, head_node_args=arguments)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int, **arguments: Any) -> Any:
        """A new node; Ray's `Cluster.add_node` says what other arguments it takes."""
        with own_workers(), forked_workers():
            memory = 128 * 2**20
            return self._cluster.add_node(num_cpus=cpus, object_store_memory=memory, **arguments)

    def kill(self, node: Any) -> None:
        """SIGKILL to the raylet: to the others, the machine is gone."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any, seconds: int) -> None:
        """A notice that the node will be gone in so many seconds."""
        subprocess.run(
            [
                *(RAY, "drain-node", "--address", self.address, "--node-id", node.node_id),
                *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"),
                *("--deadline-remaining-seconds", str(seconds)),
            ],
            check=True,
            capture_output=True,
        )

    def close(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", self._folder)  # where the address is deleted again
            self._cluster.shutdown()


@contextmanager
def nodes() -> Iterator[Nodes]:
    """A cluster that is gone, with its files, when the block ends."""
    close_ray()
    folder = tempfile.mkdtemp(prefix="nodes-", dir="/tmp")  # sockets need short paths
    try:
        cluster = Nodes(folder)
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train_workers(address: str) -> list[psutil.Process]:
    """The processes of all Ray Train workers of the cluster at `address`."""
    return actors("RayTrainWorker", address)


def actors(name: str, address: str) -> list[psutil.Process]:
    """The processes of all actors of one class, of the cluster at `address`."""
    port = address.rsplit(":", 1)[1]
    return [
        process
        for process in psutil.process_iter()
        if _command(process).startswith(f"ray::{name}")
        and any(f":{port}" in _command(parent) for parent in _parents(process))
    ]


def workers_of(driver: int) -> list[psutil.Process]:
    """The processes of all Ray Train workers of the cluster that a driver started for itself."""
    below = psutil.Process(driver).children(recursive=True)
    return [process for process in below if _command(process).startswith("ray::RayTrainWorker")]


def helpers_of(driver: int, name: str) -> list[psutil.Process]:
    """The processes of all actors of one class, of the cluster that a driver started for itself."""
    below = psutil.Process(driver).children(recursive=True)
    return [process for process in below if _command(process).startswith(f"ray::{name}")]


def send(process: psutil.Process, number: signal.Signals) -> None:
    os.kill(process.pid, number)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _parents(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.parents()
    except psutil.Error:
        return []
