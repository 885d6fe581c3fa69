"""The doctor: finds what works, and says of the rest what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastrata.driver.doctor import (
    Finding,
    check_disk,
    check_memory,
    check_shared_memory,
)
from support.command import run, run_json


def test_a_machine_that_is_well(tmp_path: Path) -> None:
    result = run_json(
        *("doctor", "--storage", tmp_path / "store"),
        *("--tracking", f"sqlite:///{tmp_path}/mlflow.db"),
    )
    assert result["ok"] is True
    checks = {check["name"]: check for check in result["checks"]}
    assert {"ray", "torch", "cpus", "ray start", "storage", "tracking", "recipes"} <= checks.keys()
    assert checks["ray start"]["found"].startswith("a local cluster starts, runs a task")
    assert list((tmp_path / "store").iterdir()) == []
    assert not (tmp_path / "mlflow.db").exists()


def test_problems_come_with_advice_and_exit_code_1() -> None:
    done = run("doctor", "--storage", "/proc/none", "--tracking", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "FAIL storage" in done.stdout
    assert "FAIL tracking" in done.stdout
    assert "-> start it (mlflow server --port 5000), or check the address" in done.stdout
    assert "problems to fix: 2" in done.stdout


@pytest.mark.parametrize(
    ("finding", "status", "found"),
    [
        (check_memory(16 * 2**30), "ok", "16.0 GiB available"),
        (check_memory(2 * 2**30), "warning", "2.0 GiB available"),
        (check_memory(2**29), "problem", "0.5 GiB available"),
        (check_shared_memory(Path("/absent")), "problem", "missing"),
        (check_disk(Path("/data"), 20 * 2**30), "ok", "20.0 GiB free in /data"),
        (check_disk(Path("/data"), 9 * 2**30), "warning", "9.0 GiB free in /data"),
    ],
)
def test_too_little_of_anything_comes_with_advice(
    finding: Finding, status: str, found: str
) -> None:
    assert (finding.status, finding.found) == (status, found)
    assert bool(finding.advice) == (status != "ok")
