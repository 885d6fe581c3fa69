"""An empty database of MLflow: its tables take seconds to make, so a process of tests makes one."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from elastrata.tracking.store import create_client


def put_empty_store(folder: Path) -> Path:
    """Copies it into a folder, which is made where it is missing: of runs, as their default store.

    Returns:
        The database.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(_template(), folder))


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="store-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "mlflow.db"
    create_client(f"sqlite:///{path}")
    return path
