"""A measurement: the quartiles of a figure, and where it was taken."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("elastrata", "torch", "ray", "numpy", "pyarrow")


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The middle of some measurements, and the bounds of their middle half."""

    lower: float
    median: float
    upper: float


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least one value; between two where none lies at the place."""
    if len(values) == 1:
        return Quartiles(lower=values[0], median=values[0], upper=values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(lower=lower, median=median, upper=upper)


def versions() -> dict[str, str]:
    """Version by package, of those that are installed here, Python and CUDA included."""
    import torch

    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # a GPU machine with PyTorch alone runs most measurements
            continue
    return {**versions, "cuda": torch.version.cuda} if torch.version.cuda else versions
