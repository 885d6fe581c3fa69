"""Prepares a data set in a process, and with a Ray, of its own.

Arguments: number of CPUs, configuration as JSON, folder or URL to fill, and the name of a stage
at which to print "reached" and wait to be killed ("" for none).
"""

from __future__ import annotations

import json
import signal
import sys

from elastrata.cluster.ray_session import ray_session
from elastrata_pipelines.preparation import PrepareConfig, prepare


def main(num_cpus: str, config: str, out: str, stop_at: str) -> None:
    def progress(stage: str, done: int, total: int, unit: str) -> None:
        if stage == stop_at and done:
            print("reached", flush=True)
            signal.pause()

    with ray_session("local", num_cpus=int(num_cpus)):
        manifest = prepare(PrepareConfig.model_validate(json.loads(config)), out, progress=progress)
    print(manifest.samples)


if __name__ == "__main__":
    main(*sys.argv[1:])
