"""Files that ship with Elastrata but are no code: where they are in a checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def cluster_files() -> Path:
    """The folder `cluster_configs`."""
    return _shipped("cluster_configs")


def tested_versions() -> dict[str, str]:
    """The versions this release was tested with, by package, from `constraints.txt`."""
    lines = _shipped("constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _shipped(name: str) -> Path:
    """The wheel carries such files inside the package; in a checkout they lie at the top."""
    installed = _PACKAGE / name
    return installed if installed.exists() else _PACKAGE.parents[1] / name
