"""Run the `elastrata` command in a process of its own: a fork that has made the imports already or,
within `own_processes`, the program itself, as a user does."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from support.forked_workers import forked_workers, has_own_processes
from support.forks import fork

_SECONDS = 500.0
_PROGRAMS = {"elastrata": "elastrata.cli.main:main", "ray": "ray.scripts.scripts:main"}
_BIN = Path(sys.executable).parent
ELASTRATA = str(_BIN / "elastrata")
"""What a user calls, with all its imports."""


class Command:
    """A command that was started; used like a `subprocess.Popen`.

    Args:
        arguments: its arguments.
        out: the file for its standard output.
        err: the file for its errors; may be the same.
        cwd: the folder it runs in. Default: the caller's.
        own_group: whether it leads a process group of its own.
        program: its name, one of `_PROGRAMS`.
        environment: its environment. Default: the caller's.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        out: Path,
        err: Path,
        *,
        cwd: Path | None = None,
        own_group: bool = False,
        program: str = "elastrata",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        texts = [*map(str, arguments)]
        place = str(cwd or Path.cwd())
        self._program: subprocess.Popen[bytes] | None = None
        if has_own_processes():
            with out.open("ab") as stdout, err.open("ab") as stderr:
                self._program = subprocess.Popen(
                    [_BIN / program, *texts],
                    stdout=stdout,
                    stderr=stderr,
                    cwd=place,
                    env=environment,
                    start_new_session=own_group,
                )
            self.pid: int = self._program.pid
            return
        with forked_workers() as variables:
            told = None if environment is None else {**environment, **variables}
            call = (program, texts, place, str(out), str(err), own_group)
            self._process = fork(_main, *call, environment=told)
        assert self._process.pid
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._program.poll() if self._program else self._process.exitcode

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self._program:
            return self._program.wait(timeout)
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired("elastrata", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it a signal, where it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


_started: list[Command] = []


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    with TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        command = Command(arguments, out, err, cwd=cwd)
        try:
            code = command.wait(_SECONDS if not has_own_processes() else 2 * _SECONDS)
        finally:
            command.send_signal(signal.SIGKILL)
        texts = out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8")
    return subprocess.CompletedProcess([ELASTRATA, *map(str, arguments)], code, *texts)


def run_json(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """The JSON object that a command, which must succeed, ends with."""
    done = run(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def start(*arguments: object, log: Path) -> Command:
    """Starts a command in a process group of its own, its output going to a file."""
    log.write_bytes(b"")
    command = Command(arguments, log, log, own_group=True)
    _started.append(command)
    return command


def kill_started() -> list[Command]:
    """Kills the commands that were started and still run, as after a test that failed.

    Returns:
        All that were started since the last call.
    """
    found = _started.copy()
    _started.clear()
    for command in found:
        if command.poll() is None:
            kill_group(command)
    return found


def kill_group(command: Command) -> None:
    """SIGKILL to a command and all it has started in its group."""
    try:
        os.killpg(command.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not come as far as to lead one
        command.send_signal(signal.SIGKILL)
    command.wait()


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Polls until `condition` gives something true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def _main(
    program: str, arguments: list[str], cwd: str, out: str, err: str, own_group: bool
) -> None:
    """Runs in the new process."""
    if own_group:
        os.setsid()
    _write_to(out, 1)
    _write_to(err, 2)
    os.chdir(cwd)
    sys.argv = [str(_BIN / program), *arguments]
    module, name = _PROGRAMS[program].split(":")
    try:
        with forked_workers():
            getattr(import_module(module), name)()
    finally:
        atexit._run_exitfuncs()


def _write_to(file: str, number: int) -> None:
    stream = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(stream, number)
    os.close(stream)
