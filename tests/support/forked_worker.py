"""A program that a raylet starts in place of a worker: asks for a fork, and lives as long as it.

A program, not a module; it imports next to nothing. It has the environment by which a session's
processes are known, and stands for the fork: where it is killed, so is the fork.
"""

import json
import os
import socket
import sys
from pathlib import Path

SOCKET = "ELASTRATA_TEST_FORKS"
"""The variable with the path of the socket at which forks are asked for."""


def main() -> int:
    asked = {"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": str(Path.cwd())}
    data = json.dumps(asked).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SOCKET])
        socket.send_fds(connection, [len(data).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(data)
        connection.recv(1)  # it closes when the fork has ended
    return 0


if __name__ == "__main__":
    sys.exit(main())
