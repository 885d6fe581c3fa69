"""What all tests share."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings

from support.forked_workers import own_workers
from support.guardian import guard
from support.left_behind import end_commands, kill_ray
from support.marks import begin
from support.s3 import s3_bucket
from support.shared_ray import close_ray, open_ray

SETTINGS_OF_OTHERS = (
    *("RAY_", "AWS_", "MLFLOW_", "HF_", "TRANSFORMERS_"),
    *("PYTHONUNBUFFERED", "FORCE_COLOR", "GITHUB_ACTIONS", "COLUMNS"),
)
for _name in [*os.environ]:
    # What a user's shell says of another cluster, store, server or terminal must not reach a test.
    if _name.startswith(SETTINGS_OF_OTHERS) and _name != "RAY_worker_niceness":
        del os.environ[_name]
os.environ["no_proxy"] = "127.0.0.1,localhost"

settings.register_profile(
    "elastrata",
    # The same examples in every run, and no test that fails because of the time that it takes.
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("elastrata")

LONG = (
    "test_train",
    "test_sweep",
    "test_pulse",
    "test_pipeline",
    "test_tensor",
    "test_sparsity",
    "test_quickstart",
    "test_readme",
    "test_notebooks",
    "test_autoscaling",
    "test_submit",
    "test_prepare",
)
"""How the names of files that take minutes begin."""
RAYS = ("e2e", "faults", "clusters")
"""Folders whose tests start clusters without a command."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files go first, so that processes side by side end at about the same time; then those
    that share a Ray, before any that ends it and begins one of its own."""
    shared = {item.path for item in items if "ray_local" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: (not item.path.name.startswith(LONG), item.path not in shared))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Name the tests that failed in the run before and pass when they run alone."""
    if config.getoption("--last-failed", default=False):
        for report in terminalreporter.getreports("passed"):
            if "e2e" in report.keywords:
                terminalreporter.write_line(
                    f"flaky: {report.nodeid} failed, then passed alone: note it in tests/FLAKY.md"
                )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let a test draw the same random numbers whichever tests ran before it in this process."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def guarded() -> Iterator[None]:
    """What tests have started ends with them, however their process ends."""
    begin()
    guardian = guard()
    yield
    end_commands()
    close_ray()
    guardian.kill()
    guardian.communicate()


@pytest.fixture(autouse=True)
def nothing_is_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves nothing behind that would slow down the next one."""
    test = begin()
    starts_rays = request.path.parent.name in RAYS
    if starts_rays:
        close_ray()
    with own_workers() if starts_rays else nullcontext():
        yield
    try:
        end_commands()
    finally:
        if starts_rays:
            kill_ray(test)


@pytest.fixture(scope="module")
def ray_local() -> None:
    """The Ray cluster of the process's tests: two logical CPUs, workers that can import tests."""
    open_ray()


@pytest.fixture(scope="module")
def ray_local_of_own_workers() -> Iterator[None]:
    """The same, for tests that kill or stop its workers: they are the raylet's children."""
    close_ray()
    with own_workers():
        open_ray()
    yield
    close_ray()


@pytest.fixture
def workers_are_children() -> Iterator[None]:
    """Commands' workers are children of their raylets: for tests that kill or stop them."""
    with own_workers():
        yield


@pytest.fixture
def bucket() -> Iterator[str]:
    """The URL of an empty bucket on an S3 server of the test's own."""
    with s3_bucket() as url:
        yield url


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """Restore the handlers of signals that a command run in this process has set."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
