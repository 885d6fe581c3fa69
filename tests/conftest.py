"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from elastrata.launch.ray_session import ray_session
from support.left_behind import begin, end_commands, kill_ray
from support.s3 import s3_bucket

settings.register_profile("elastrata", deadline=None)  # other work on a machine takes its time
settings.load_profile("elastrata")

LONG = ("test_train", "test_quickstart", "test_audit", "test_tensor", "test_pipeline", "test_pulse")
"""How the names of files that take minutes begin."""
RAYS = ("faults", "clusters")
"""Folders whose tests start clusters without a command."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, so that processes side by side end at about the same time."""
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


def pytest_sessionfinish() -> None:
    """What a fixture of several tests started, and failed to end."""
    end_commands()


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves nothing behind that would slow down the next one."""
    test = begin()
    yield
    try:
        end_commands()
    finally:
        if request.path.parent.name in RAYS:
            kill_ray(test)


@pytest.fixture(scope="module")
def ray_local() -> Iterator[None]:
    """A Ray cluster of the module's own: two logical CPUs, workers that can import tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with ray_session("local", num_cpus=2):
            yield


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of the test's own."""
    with s3_bucket() as url:
        yield url
