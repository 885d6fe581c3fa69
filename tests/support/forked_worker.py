"""A program that runs in place of one of Ray's: asks for a fork that becomes it, and lives as long.

A program, not a module; it imports next to nothing. It has the environment by which a session's
processes are known, and stands for the fork: where it is killed, so is the fork. Its arguments are
those of a worker, or another of Ray's programs and the arguments of that. A worker's may begin with
its own file: Ray's way to say "set up this worker", which is done here, too, where it is a matter
of variables; one with packages of its own becomes Ray's own program.
"""

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path
from select import select
from typing import NoReturn

SOCKET = "ELASTRATA_TEST_FORKS"
"""The variable with the path of the socket at which forks are asked for."""
_SECONDS_BETWEEN_LOOKS = 0.5
_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="


def main() -> int:
    parent = os.getppid()
    arguments = [each for each in sys.argv[1:] if each != __file__]
    for each in arguments:
        if each.startswith(_CONTEXT):
            context = json.loads(each.removeprefix(_CONTEXT))
            if not _is_of_variables(context):
                _become_rays_own(arguments)
            for name, value in context["env_vars"].items():
                os.environ[name] = os.path.expandvars(value)
    passed = [each for each in arguments if not each.startswith((_CONTEXT, _LANGUAGE))]
    asked = {"argv": passed, "environment": dict(os.environ), "cwd": str(Path.cwd())}
    data = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(data)
        while not select([connection], [], [], _SECONDS_BETWEEN_LOOKS)[0]:
            if os.getppid() != parent:
                break
    return 0  # the fork has ended, or ends with the connection


def _is_of_variables(context: dict) -> bool:
    """Whether an environment, as Ray's `RuntimeEnvContext` tells it, changes nothing else."""
    told = {name for name, value in context.items() if value}
    return told <= {"env_vars", "py_executable"} and context["py_executable"] == sys.executable


def _become_rays_own(arguments: list[str]) -> NoReturn:
    """Goes on as the program in whose place this one was started."""
    (ray,) = importlib.util.find_spec("ray").submodule_search_locations
    setup, worker = (
        str(Path(ray, "_private", "workers", name))
        for name in ("setup_worker.py", "default_worker.py")
    )
    options = [each for each in arguments if each.startswith((_CONTEXT, _LANGUAGE))]
    others = [each for each in arguments if each not in options]
    os.execv(sys.executable, [sys.executable, "-u", setup, *options, worker, *others])


if __name__ == "__main__":
    sys.exit(main())
