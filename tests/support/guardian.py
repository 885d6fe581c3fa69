"""The guardian of tests: a small process that ends what they had started when theirs was killed.

Clusters that tests start, servers and ranks have no other. It notices the death by a pipe that only
the tests' process holds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from support.marks import OURS, VARIABLE, marked

_ROUNDS = 50
_SECONDS_BETWEEN_ROUNDS = 0.2


def guard() -> subprocess.Popen[bytes]:
    """Starts the guardian of what this process marks. Killed, it does nothing."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.Popen(
        [sys.executable, "-m", __name__, OURS],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
        env=environment,
    )


def end(marks: str) -> None:
    """SIGKILL to all whose mark begins so, and to what they start meanwhile."""
    for _ in range(_ROUNDS):
        left = list(marked(marks))
        if not left:
            return
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SECONDS_BETWEEN_ROUNDS)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
