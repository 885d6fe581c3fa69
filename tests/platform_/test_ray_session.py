"""The Ray session of a command: it is its own, quiet, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


ADDRESSES = """
import os, sys
from concurrent.futures import ThreadPoolExecutor

import grpc

from elastrata.driver import ray_session
from elastrata_pipelines.errors import UserError
from support.deaf_servers import deaf_server, refused_port, say_nothing

def deny(request, context):
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: it is missing or incorrect")

class Denying(grpc.GenericRpcHandler):
    def service(self, call):
        return grpc.unary_unary_rpc_method_handler(deny)

def join(address, variable=None):
    os.environ.pop("RAY_ADDRESS", None)
    if variable:
        os.environ["RAY_ADDRESS"] = variable
    try:
        with ray_session.ray_session(address):
            print("joined")
    except UserError as error:
        for line in error.problems:
            print(line.replace(str(port), "PORT"))

ray_session.READ_SECONDS = 1
port = "-"
with refused_port() as port:
    join(f"127.0.0.1:{port}")
    join(None, f"127.0.0.1:{port}")
    join("auto", f"127.0.0.1:{port}")
    join(f"ray://127.0.0.1:{port}")
for address in ("junk", "127.0.0.1:99999", "127.0.0.1:", ":6379", "http://127.0.0.1"):
    join(address)
    join(None, address)
with deaf_server(say_nothing, "0.0.0.0") as port:  # Ray asks at another address of this machine
    join(f"127.0.0.1:{port}")
head = grpc.server(ThreadPoolExecutor(1), handlers=[Denying()])
port = head.add_insecure_port("0.0.0.0:0")
head.start()
join(f"127.0.0.1:{port}")
join(None, f"127.0.0.1:{port}")
"""


def test_a_cluster_that_cannot_be_joined_takes_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ADDRESSES],
        capture_output=True,
        encoding="utf-8",
        timeout=100,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "HOME": str(tmp_path), "RAY_AUTH_MODE": ""},
    )
    refused = "127.0.0.1:PORT: no Ray cluster answers there ([Errno 111] Connection refused)"
    expected = [
        f"--address: {refused}",
        f"RAY_ADDRESS: {refused}",
        f"RAY_ADDRESS: {refused}",
        f"--address: ray://{refused}",
    ]
    for address in ("junk", "127.0.0.1:99999", "127.0.0.1:", ":6379", "http://127.0.0.1"):
        line = f"{address}: expected auto, local or HOST:PORT, such as 10.0.0.1:6379"
        expected += [f"--address: {line}", f"RAY_ADDRESS: {line}"]
    expected.append("--address: 127.0.0.1:PORT: no Ray cluster answers there (Deadline Exceeded)")
    denied = (
        "127.0.0.1:PORT: the cluster requires a token (InvalidAuthToken: it is missing or "
        "incorrect): set "
        "RAY_AUTH_MODE=token, and give the token in RAY_AUTH_TOKEN, in the file "
        "RAY_AUTH_TOKEN_PATH or in ~/.ray/auth_token"
    )
    expected += [f"--address: {denied}", f"RAY_ADDRESS: {denied}"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert done.returncode == 0
