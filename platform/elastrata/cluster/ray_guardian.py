"""The guardian of a session: a small process that ends what a dead driver leaves.

Linux ends the processes that the driver itself started at its death; it does not end their
children, nor is one that is stopped, or hangs, heard of again. The guardian notices the death by a
pipe that only the driver holds, and by having another parent. It is in a session of its own, so
that neither Ctrl-C nor the kill of a process group reaches it; where it is killed as well, the next
command of the same run does its work, or `elastrata doctor --clean`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from select import select

from elastrata.cluster.ray_processes import MARK, Session, read_mark

_SECONDS_BETWEEN_LOOKS = 1.0


@contextmanager
def guarded(session: Session) -> Iterator[None]:
    """Runs its block with a guardian, which ends the session where this process dies meanwhile."""
    if session.driver is None:
        yield
        return
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, session.mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=environment,
    )
    try:
        yield
    finally:
        guardian.kill()
        guardian.communicate()


def main(mark: str) -> None:
    """Waits for the driver's death. The logs stay, for whoever wants to know of what it died."""
    session = read_mark(mark)
    if session is None or session.driver is None:
        return
    while os.getppid() == session.driver.pid:
        if select([0], [], [], _SECONDS_BETWEEN_LOOKS)[0] and not os.read(0, 1):
            break
    session.end()
    session.remove(logs=False)


if __name__ == "__main__":
    main(sys.argv[1])
