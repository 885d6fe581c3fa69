"""Paths of files other than code that ship with Elastrata, in a checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent


def cluster_files() -> Path:
    """Return the folder `cluster_configs`."""
    return _path_of("cluster_configs")


def constraint_versions() -> dict[str, str]:
    """Return the versions that this release was tested with, by package, from `constraints.txt`."""
    lines = _path_of("constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _path_of(name: str) -> Path:
    """Return the path of a file that ships with Elastrata."""
    # The wheel has such files inside of the package; a checkout has them in its root.
    packaged_path = _PACKAGE / name
    return packaged_path if packaged_path.exists() else _PACKAGE.parents[1] / name
