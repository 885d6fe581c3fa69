"""A program that runs in place of one of Ray's: asks for a fork that becomes it, and lives as long.

A program, not a module; it imports next to nothing. It has the environment by which a session's
processes are known, and stands for the fork: where it is killed, so is the fork. Its arguments are
those of a worker, or another of Ray's programs and the arguments of that. A worker's may begin with
its own file: Ray's way to say "set up this worker", which is done here, too.
"""

import json
import os
import socket
import sys
from pathlib import Path
from select import select

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
            _set_up(json.loads(each.removeprefix(_CONTEXT)))
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


def _set_up(context: dict) -> None:
    """The environment of a worker, as Ray's `RuntimeEnvContext` gives it."""
    told = {name for name, value in context.items() if value}
    if told - {"env_vars", "py_executable"} or context["py_executable"] != sys.executable:
        sys.exit(f"workers of tests know nothing of {context}")
    for name, value in context["env_vars"].items():
        os.environ[name] = os.path.expandvars(value)


if __name__ == "__main__":
    sys.exit(main())
