"""What cases import, installed where it is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SITE = ROOT / "build" / "gpu"
"""What a machine lacks is installed here."""
NEEDED = {"numpy": "numpy", "fsspec": "fsspec", "pyarrow": "pyarrow", "yaml": "pyyaml"} | {
    "pydantic": "pydantic"
}
"""By the name of the module, the package; beside PyTorch."""


def installed(wheels: Path) -> Mapping[str, str]:
    """The environment of all cases, in which there is what they import.

    What is missing is installed into a folder of the checkout: from the folder of wheels where
    there is one, else from the package index.
    """
    if importlib.util.find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no PyTorch; PYTHON=... names another Python")
    sys.path.append(str(SITE))
    missing = [package for module, package in NEEDED.items() if not _is_there(module)]
    if missing:
        _install(missing, wheels)
    if not list(importlib.metadata.distributions(name="elastrata")):
        _register()
    paths = [HERE, ROOT / "platform", ROOT / "pipelines", ROOT / "workloads", SITE]
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, paths), *([inherited] if inherited else [])])}


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _install(packages: Sequence[str], wheels: Path) -> None:
    carried = ["--no-index", "--find-links", str(wheels)] if any(wheels.glob("*.whl")) else []
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = ["-c", str(ROOT / "constraints.txt"), "--upgrade", "--target", str(SITE)]
    if subprocess.run([*command, *carried, *constraints, *packages]).returncode:
        lacks = f"{wheels} does not hold all of them" if carried else f"{wheels} holds no wheels"
        sys.exit(f"missing: {', '.join(packages)}; {lacks}: `make gpu-wheels`, with a network")


def _register() -> None:
    """Tells Python of the checkout's workloads, as an installation would."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = SITE / f"elastrata-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    about = f"Metadata-Version: 2.1\nName: elastrata\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(about, encoding="utf-8")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
