"""The entrypoint of a submitted job: `elastrata train`, again where it was killed, as the same run.

    python3 -m elastrata.deploy.job_entrypoint VERSION TRIES ARGUMENT...

Exits as `elastrata train` did at last. A signal to stop reaches that from Ray, too; this process
waits until it has saved.
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
    """The exit code of the job.

    Args:
        arguments: the version that is expected, how often to try again, and the arguments of
            `elastrata train`.
    """
    wanted, tries, *rest = arguments
    if version("elastrata") != wanted:
        sys.stderr.write(
            f"elastrata {version('elastrata')} is installed on the cluster, and {wanted} has "
            "submitted the job; submit without --installed, or install the same version\n"
        )
        return BAD_INPUT
    sys.stderr.write(f"elastrata {wanted} from {Path(__file__).parents[1]}\n")
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: asked.append(number))
    for left in range(int(tries), -1, -1):
        # What fails far away is told in full: nobody can try it again by hand there.
        command = [sys.executable, "-m", "elastrata", "--traceback", "train", *rest]
        code = subprocess.Popen(command).wait()
        if code >= 0 or asked or not left:
            break
        name = signal.Signals(-code).name
        sys.stderr.write(f"the driver was killed ({name}); trying again, {left - 1} tries left\n")
        sys.stderr.flush()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
