"""The wheel: an installation without the checkout has the command, recipes and cluster files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = (
    "import elastrata, elastrata_workloads.bert as b, elastrata_pipelines as p\n"
    "from elastrata.shipped import cluster_files, constraint_versions\n"
    "print(elastrata.__file__, b.__file__, p.__file__)\n"
    "print(cluster_files())\n"
    "print(sorted(path.name for path in cluster_files().iterdir()))\n"
    "print(constraint_versions()['ray'])\n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (found,) = folder.glob("*.whl")
    return found


def _run(*command: object, cwd: Path, path: Path | None = None) -> str:
    """Runs a command that must succeed, with `path` first on Python's path; its output."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _check(
    python: Path, command: Path, installed: Path, elsewhere: Path, path: Path | None
) -> None:
    """The installation in the folder `installed` works from the working directory `elsewhere`."""
    assert "quickstart" in _run(command, "--help", cwd=elsewhere, path=path)
    schema = json.loads(_run(command, "schema", "--json", cwd=elsewhere, path=path))
    assert "workload bert" in schema["$defs"]
    found = _run(python, "-c", SHIPPED, cwd=elsewhere, path=path).splitlines()
    assert all(Path(file).is_relative_to(installed) for file in found[0].split())
    assert Path(found[1]).is_relative_to(installed)
    assert found[2] == str(sorted(path.name for path in (ROOT / "cluster_configs").iterdir()))
    assert found[3] == "2.60.0"
    load = "from elastrata import load_recipe; print(load_recipe('bert/tiny').name)"
    assert _run(python, "-c", load, cwd=elsewhere, path=path).strip() == "bert-tiny"


@pytest.mark.matrix  # an installation
def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """Its packages come from the wheel, the libraries from this environment."""
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    _run(
        *(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"),
        *("--target", installed, wheel),
        cwd=elsewhere,
    )
    command = installed / "bin" / "elastrata"
    _check(Path(sys.executable), command, installed, elsewhere, installed)
