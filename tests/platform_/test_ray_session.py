"""The Ray session of a command: it is its own, quiet, and gone afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

OWN_AND_GONE = """
import os
import ray
from pathlib import Path
from elastrata.driver.ray_session import NICENESS, ray_session

def folder():
    return Path(ray._private.worker._global_node.get_session_dir_path()).parent

def nice_of_a_worker():
    return ray.get(ray.remote(lambda: os.nice(0)).remote())

with ray_session(num_cpus=1):
    mine = folder()
    assert mine.name.startswith("ray-")
    assert nice_of_a_worker() == 0
    assert NICENESS not in os.environ
    with ray_session():
        assert ray.cluster_resources()["CPU"] == 1
    assert ray.is_initialized()
assert not ray.is_initialized()
assert not mine.exists()
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


SIGTERM_WHILE_RAY_STARTS = """
import os, signal, sys, threading, time
from elastrata.cluster.processes import children, title
from elastrata.driver.ray_session import ray_session

wanted = sys.argv[1]

def ours(number, frame):
    raise KeyboardInterrupt

def names():
    return [title(child) for child in children(os.getpid())]

def send():
    while not any(wanted in name for name in names()):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, ours)
threading.Thread(target=send, daemon=True).start()
try:
    with ray_session(num_cpus=1):
        print("started")
except KeyboardInterrupt:
    print("interrupted")
assert signal.getsignal(signal.SIGTERM) is ours
"""


@pytest.mark.parametrize("process", ["gcs_server", "raylet"])
def test_sigterm_while_ray_starts_is_an_interrupt(process: str) -> None:
    command = [sys.executable, "-c", SIGTERM_WHILE_RAY_STARTS, process]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


SIGTERM_IN_THE_CORE = """
import os, signal
import ray._private.worker

from elastrata.driver.ray_session import ray_session

def ours(number, frame):
    print("ours")

class CoreWorker(ray._raylet.CoreWorker):
    def __init__(self, *arguments):  # Ray's C++ has just installed its own handler
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, ours)
ray._raylet.CoreWorker = CoreWorker
with ray_session(num_cpus=1):
    print("started")
"""


def test_sigterm_while_rays_core_starts_prints_no_stack() -> None:
    command = [sys.executable, "-c", SIGTERM_IN_THE_CORE]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ours\nstarted\n", "")


def test_a_cluster_that_does_not_answer_is_told() -> None:
    code = """
from elastrata.driver.ray_session import ray_session
with ray_session('127.0.0.1:1'): pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert "UserError: --address: 127.0.0.1:1: no Ray cluster answers there" in done.stderr
