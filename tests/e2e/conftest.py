"""End-to-end tests: the commands that users call, on the Ray that users have.

Every process is a program of its own here, as on a user's machine: none is a fork of a process that
has made the imports already. A test waits for events; its limits are ten times what it takes on an
idle machine of two cores, so only a run that hangs reaches them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.forked_workers import own_processes
from support.shared_ray import close_ray

HERE = Path(__file__).parent
SECONDS = 1200
"""For a test."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, except for those that only `make test-all` runs."""
    for item in items:
        if item.path.is_relative_to(HERE) and not item.get_closest_marker("matrix"):
            item.add_marker(pytest.mark.e2e)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(autouse=True, scope="module")
def programs_of_their_own() -> Iterator[None]:
    """Start Ray's processes and the commands as programs."""
    close_ray()
    with own_processes():
        yield
