"""Facts about a start that a reader of its record will want: versions, commit, machine."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version

PACKAGES = ("elastrata", "ray", "torch", "transformers", "pyarrow", "mlflow")


def versions() -> dict[str, str]:
    """Version by package, Python included."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def git_commit() -> str | None:
    """The commit of the working directory's repository; None where it is not one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def start_tags(data_fingerprint: str, run_dir: str) -> dict[str, str]:
    """The tags of a start of a run."""
    commit = git_commit()
    return {
        "data.fingerprint": data_fingerprint,
        "run_dir": run_dir,
        **({"git.commit": commit} if commit else {}),
        **{f"version.{name}": value for name, value in versions().items()},
    }
