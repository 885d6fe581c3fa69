"""The Ray that the tests of a process share, module after module: its start takes ten seconds.

A test that injects faults, or that needs nodes, has a Ray of its own, and ends this one first.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.forked_workers import forked_workers

_NUM_CPUS = 2
_SECONDS_TO_SETTLE = 10.0
_session = ExitStack()


def open_ray() -> None:
    """Two logical CPUs, all of them free, and workers that can import tests."""
    import ray

    if ray.is_initialized() and not _settles():
        close_ray()
    if not ray.is_initialized():
        _start()


def close_ray() -> None:
    """Ends it, where it runs."""
    _session.close()


def _start() -> None:
    from elastrata.driver.ray_session import ray_session

    with forked_workers(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        _session.enter_context(ray_session("local", num_cpus=_NUM_CPUS))


def _settles() -> bool:
    """Whether all that the module before has claimed becomes free."""
    import ray

    from support.command import wait_until

    try:
        wait_until(
            lambda: ray.available_resources().get("CPU") == _NUM_CPUS,
            _SECONDS_TO_SETTLE,
            "free CPUs",
        )
    except AssertionError:
        return False
    return True
