"""Warm spares, with a real Ray: actors take processes that were there, with the imports done."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import ray

from elastrata.cluster import prestarted
from support.command import wait_until

MODULE = "wsgiref.simple_server"
"""Of the standard library, and nothing here imports it."""

pytestmark = pytest.mark.usefixtures("ray_local_of_own_workers")


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self) -> None:
        self._knew_at_birth = MODULE in sys.modules

    def birth(self) -> tuple[int, bool]:
        return os.getpid(), self._knew_at_birth

    def keep_warm(self, spares: int) -> None:
        self._spares = prestarted.SparePool(spares)

    def waiting(self) -> set[int]:
        return set(prestarted.find_spares())


@ray.remote(num_cpus=0)
def pid() -> int:
    return os.getpid()


def _worker(*modules: str) -> Any:
    return Worker.options(runtime_env=prestarted.runtime_env(modules)).remote()


def _births(workers: list[Any]) -> dict[int, bool]:
    return dict(ray.get([worker.birth.remote() for worker in workers]))


def _waiting(worker: Any, spares: int) -> set[int]:
    """The spares that `worker` sees, once there are that many."""

    def as_many() -> set[int] | None:
        found: set[int] = ray.get(worker.waiting.remote())
        return found if len(found) == spares else None

    found: set[int] = wait_until(as_many, 500, f"{spares} spares")
    return found


# Every test has an environment of its own: spares outlive the test that asked for them.


def test_the_next_actors_take_the_spares_and_those_are_replaced() -> None:
    first = _worker(MODULE)
    ray.get(first.keep_warm.remote(3))  # more than the cluster has CPUs
    spares = _waiting(first, 3)

    second = [_worker(MODULE), _worker(MODULE)]
    births = _births(second)

    assert births.keys() < spares
    assert all(births.values())
    assert _waiting(first, 3).isdisjoint(births)


def test_a_process_that_ran_a_task_is_given_to_no_actor() -> None:
    """Why spares are not made by tasks."""
    modules = [MODULE, "wsgiref.headers"]
    ran = ray.get(pid.options(runtime_env=prestarted.runtime_env(modules)).remote())
    assert ran not in _births([_worker(*modules)])
