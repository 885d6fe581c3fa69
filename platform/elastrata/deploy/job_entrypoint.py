"""Entrypoint of a submitted job: `elastrata train`, restarted if it was killed.

python3 -m elastrata.deploy.job_entrypoint VERSION TRIES ARGUMENT...

A restart continues the same run. The exit code is that of the last `elastrata train`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

BAD_INPUT = 2


def main(arguments: Sequence[str]) -> int:
    """Run the job and return its exit code.

    Args:
        arguments: the expected version, the number of restarts, and the arguments of `elastrata
            train`.
    """
    expected, tries, *rest = arguments
    if version("elastrata") != expected:
        sys.stderr.write(
            f"elastrata {version('elastrata')} is installed on the cluster, but {expected} has "
            "submitted the job; submit without --installed, or install the same version\n"
        )
        return BAD_INPUT
    sys.stderr.write(f"elastrata {expected} from {Path(__file__).parents[1]}\n")
    received_signals: list[int] = []
    # Ray signals `elastrata train`, too; this process only waits until that has saved and ended.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: received_signals.append(number))
    for tries_left in range(int(tries), -1, -1):
        # A full traceback: the user cannot repeat the command on the remote cluster by hand.
        command = [sys.executable, "-m", "elastrata", "--traceback", "train", *rest]
        code = subprocess.Popen(command).wait()
        if code >= 0 or received_signals or not tries_left:
            break
        name = signal.Signals(-code).name
        sys.stderr.write(
            f"the driver was killed ({name}); trying again, {tries_left - 1} tries left\n"
        )
        sys.stderr.flush()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
