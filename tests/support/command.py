"""Runs the `elastrata` command as a user does: as a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_started: list[subprocess.Popen[bytes]] = []
ELASTRATA = str(Path(sys.executable).with_name("elastrata"))


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [ELASTRATA, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=240
    )


def run_json(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """The JSON object that a command, which must succeed, ends with."""
    done = run(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def start(*arguments: object, log: Path) -> subprocess.Popen[bytes]:
    """Starts a command in a process group of its own, its output going to a file."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [ELASTRATA, *map(str, arguments)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started.append(process)
    return process


def kill_started() -> list[subprocess.Popen[bytes]]:
    """Kills the commands that were started and still run, as after a test that failed.

    Returns:
        All that were started since the last call.
    """
    found = _started.copy()
    _started.clear()
    for process in found:
        if process.poll() is None:
            kill_group(process)
    return found


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a command and all it has started in its group."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until `condition` gives something true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")
