"""`elastrata submit` and `stop`: runs as jobs of a real cluster, with a dashboard and a token."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from elastrata.run import history
from elastrata_pipelines.storage import Storage
from support.command import ELASTRATA, wait_until
from support.marks import OURS, marked
from support.served import Served, client_environment, served
from support.short_steps import write_recipe

STEPS = 100_000
"""More than there is time for."""
METRICS = {
    *("ray_elastrata_step", "ray_elastrata_loss", "ray_elastrata_tokens_per_second"),
    *("ray_elastrata_imbalance", "ray_elastrata_world_size"),
    *("ray_elastrata_seconds_waiting_for_data", "ray_elastrata_goodput_seconds"),
}
"""Those that a run has from its first step, on a device whose peak is not known."""


class Submitted:
    """A recipe in a folder that all nodes share, and a cluster to run it on."""

    def __init__(self, cluster: Served, recipe: Path) -> None:
        self.cluster = cluster
        self.recipe = recipe
        self._history = Storage(str(recipe.parent / "runs" / "far" / "history"))

    def command(self, *arguments: str) -> list[str]:
        return [ELASTRATA, *arguments, "--cluster", self.cluster.address]

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as stream:
            return subprocess.Popen(
                self.command("submit", str(self.recipe), "--name", "far"),
                env=self.cluster.environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )

    def of_kind(self, kind: str) -> list[Any]:
        return [entry for entry in history.read_entries(self._history) if entry["kind"] == kind]

    def steps(self) -> list[Any]:
        return list(history.effective_steps(history.read_entries(self._history)))


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitted]:
    with served() as cluster:
        cluster.add(cpus=2)
        cluster.add(cpus=2)
        recipe = write_recipe(tmp_path_factory.mktemp("shared"), steps=STEPS)
        yield Submitted(cluster, recipe)


@pytest.mark.timeout(900)
def test_a_killed_driver_a_stop_and_a_second_submission_are_one_run(
    submitted: Submitted, tmp_path: Path
) -> None:
    log = tmp_path / "first"
    first = submitted.start(log)
    _wait_for_steps(log, groups=1)
    assert re.search(
        r"elastrata \S+ from \S+/py_modules_files/\S+/elastrata\n", log.read_text(encoding="utf-8")
    )
    wait_until(lambda: _metrics(submitted) >= METRICS, 600, "the run's metrics")
    (driver,) = _drivers()
    driver.send_signal(signal.SIGKILL)
    again = _run(submitted, "submit", str(submitted.recipe), "--name", "far")
    assert again.returncode == 2
    assert "already trains that run" in again.stderr
    _wait_for_steps(log, groups=2)
    assert "the driver was killed (SIGKILL); trying again, 9 tries left" in log.read_text(
        encoding="utf-8"
    )
    _stop(submitted)
    first.wait(timeout=600)
    kept = len(submitted.steps())
    again_log = tmp_path / "second"
    second = submitted.start(again_log)
    _wait_for_steps(again_log, groups=1)
    _stop(submitted)
    second.wait(timeout=600)
    assert [entry["status"] for entry in submitted.of_kind("ended")] == ["KILLED", "KILLED"]
    steps = [step["step"] for step in submitted.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > kept
    assert submitted.of_kind("started")[-1]["step"] >= kept  # nothing that was saved is done again
    assert _run(submitted, "stop", "far").returncode == 2


def _stop(submitted: Submitted) -> None:
    stopped = _run(submitted, "stop", "far", "--json")
    assert stopped.returncode == 0, stopped.stderr
    assert list(json.loads(stopped.stdout.splitlines()[-1])["jobs"].values()) == ["STOPPED"]


def test_a_wrong_token_takes_one_line(submitted: Submitted) -> None:
    done = subprocess.run(
        submitted.command("submit", "bert/tiny"),
        env=client_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "another"}),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "the cluster requires a token" in line


@pytest.mark.parametrize("given", ["--address", "RAY_ADDRESS"])
def test_joining_a_cluster_without_its_token_takes_one_line(
    submitted: Submitted, tmp_path: Path, given: str
) -> None:
    head, text = submitted.cluster.gcs_address, tmp_path / "text.txt"
    text.write_text("one document", encoding="utf-8")
    prepare = ["prepare", "--text", str(text), "--out", str(tmp_path / "data")]
    address = ["--address", head] if given == "--address" else []
    done = subprocess.run(
        [ELASTRATA, *prepare, *address],
        env=client_environment({} if address else {"RAY_ADDRESS": head}),
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{given}: {head}: the cluster requires a token (InvalidAuthToken: ")


def test_folders_of_this_machine_alone_are_refused(submitted: Submitted) -> None:
    done = _run(submitted, "submit", "bert/tiny")
    assert done.returncode == 2
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == ["storage", "data.path"]


def _run(submitted: Submitted, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        submitted.command(*arguments),
        env=submitted.cluster.environment,
        capture_output=True,
        encoding="utf-8",
        timeout=600,
    )


def _metrics(submitted: Submitted) -> set[str]:
    """The run's metrics that Prometheus gets from the head, where the driver is."""
    try:
        with urlopen(submitted.cluster.metrics_address, timeout=60) as answer:
            text = answer.read().decode()
    except OSError:  # nothing answers there yet
        return set()
    return set(re.findall(r'^(ray_elastrata_\w+)\{.*run="far"', text, flags=re.MULTILINE))


def _wait_for_steps(log: Path, *, groups: int) -> None:
    """Until so many groups of workers have shown steps."""

    def has_stepped() -> bool:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert ": FAILED" not in text, text
        parts = re.split(r"^training on", text, flags=re.MULTILINE)
        return len(parts) > groups and "\nstep " in parts[-1]

    try:
        wait_until(has_stepped, 600, f"steps of group {groups}")
    except AssertionError:
        raise AssertionError(log.read_text(encoding="utf-8", errors="replace")) from None


def _drivers() -> list[psutil.Process]:
    """The `elastrata train` of jobs: what `elastrata.deploy.job_entrypoint` started."""
    found = []
    ours = set(marked(OURS))
    for process in psutil.process_iter():
        try:
            if process.pid not in ours:
                continue
            parent = process.parent()
            if parent and "elastrata.deploy.job_entrypoint" in parent.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found
