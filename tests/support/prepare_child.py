"""Prepares a data set in a process, and with a Ray, of its own."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.preparation import PrepareConfig, prepare
from support.forked_workers import forked_workers
from support.forks import fork, forks


def start_preparation(
    num_cpus: int, config: Mapping[str, object], out: str, stop_at: str = ""
) -> tuple[ForkServerProcess, Connection]:
    """Starts one.

    Args:
        num_cpus: of its Ray.
        config: of the preparation.
        out: the folder or URL to fill.
        stop_at: the stage at which it says so and waits to be killed; "" for none.

    Returns:
        The process, and where it sends the name of the stage it stops at.
    """
    reading, writing = forks().Pipe(duplex=False)
    with forked_workers():
        process = fork(_prepare, num_cpus, dict(config), out, stop_at, writing)
    writing.close()
    return process, reading


def _prepare(
    num_cpus: int, config: dict[str, object], out: str, stop_at: str, reached: Connection
) -> None:
    def progress(stage: str, done: int, total: int, unit: str) -> None:
        if stage == stop_at and done:
            reached.send(stage)
            signal.pause()

    with forked_workers(), ray_session("local", num_cpus=num_cpus):
        prepare(PrepareConfig.model_validate(config), out, progress=progress)
