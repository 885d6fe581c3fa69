"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrata.ray_session import ray_session


@pytest.fixture(scope="session")
def ray_local() -> Iterator[None]:
    """A Ray cluster of the test run's own, with two logical CPUs, whose workers can import tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        with ray_session("local", num_cpus=2):
            yield
