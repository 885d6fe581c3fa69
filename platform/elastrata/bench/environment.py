"""Where a figure was measured: what a reader needs to compare it with another."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("elastrata", "torch", "ray", "numpy", "pyarrow")


def versions() -> dict[str, str]:
    """Version by package, of those that are installed here, Python and CUDA included."""
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a GPU machine with PyTorch alone runs most measurements
            continue
    return {**found, "cuda": torch.version.cuda} if torch.version.cuda else found
