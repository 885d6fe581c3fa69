"""Helpers of a run that are stopped by a signal, one after the other: the run goes on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import mlflow
import psutil
import pytest

from elastrata.checkpoints.commit import commits
from elastrata_pipelines.storage import Storage
from support.command import run_json, wait_until
from support.live_run import LiveRun
from support.nodes import helpers_of, send
from support.short_steps import HOT_STEPS, write_recipe

STEPS = 100_000
"""More than a run gets to: it is interrupted at the end."""
FEW = 5
PATIENCE = 200
"""Seconds: a helper has 10 to answer, Ray takes 5 to kill it and some to start another one."""
SLEEP_SECONDS = 30.0
"""Several times `hang_seconds`: all that the driver looks after is silent to it for so long."""
NOT_FOR_STEPS = ("ControlChannel", "ReplicaStore", "ReplicaRegistry")


def stop(live: LiveRun, name: str) -> tuple[float, float]:
    """Stops a helper, and waits until it is gone.

    Returns:
        When it was stopped and when it was gone.
    """
    pid = live.driver.pid
    (helper,) = wait_until(lambda: helpers_of(pid, name), PATIENCE, f"{name}\n{live.output}")
    stopped = time.time()
    send(helper, signal.SIGSTOP)
    wait_until(lambda: not _is_there(helper), PATIENCE, f"the end of {name}\n{live.output}")
    return stopped, time.time()


def stop_and_see_another(live: LiveRun, name: str) -> tuple[float, float]:
    """The same, and waits until there is another one."""
    away, pid = stop(live, name), live.driver.pid
    wait_until(lambda: helpers_of(pid, name), PATIENCE, f"another {name}\n{live.output}")
    return away


def _is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def interrupt(live: LiveRun) -> None:
    live.send(signal.SIGINT)
    assert live.driver.wait(timeout=PATIENCE) == 130, live.output


def assert_whole(recipe: Path, name: str, live: LiveRun) -> None:
    """Every step once, with its samples, in the history and in the one record in MLflow."""
    folder = recipe.parent / "runs" / name
    steps = [step["step"] for step in live.steps()]
    assert steps == list(range(1, len(steps) + 1))
    assert commits(Storage(str(folder / "checkpoints")))[0].step == steps[-1]
    assert run_json("audit", folder)["partition_ok"]
    client = mlflow.MlflowClient(f"sqlite:///{recipe.parent / 'runs' / 'mlflow.db'}")
    (record,) = client.search_runs(
        [client.get_experiment_by_name("elastrata").experiment_id],
        f"tags.mlflow.runName = '{name}'",
    )
    logged = client.get_metric_history(record.info.run_id, "train/loss")
    assert sorted(metric.step for metric in logged) == steps


@pytest.mark.matrix  # a minute and more, on a machine that is its own
def test_steps_go_on_while_a_helper_is_stopped(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    live = LiveRun(recipe, "helpers", tmp_path / "log", "workers.max=1", "workers.spares=false")
    live.wait_for_group(1)
    away = {name: stop_and_see_another(live, name) for name in NOT_FOR_STEPS}
    live.wait_for_more(2 * HOT_STEPS)
    interrupt(live)
    done = [float(step["time"]) for step in live.steps()]
    for name, (stopped, gone) in away.items():
        assert sum(stopped < at < gone for at in done) >= FEW, f"{name}\n{live.output}"
    assert live.of_kind("fault") == []
    assert_whole(recipe, "helpers", live)


@pytest.mark.matrix
def test_a_driver_that_slept_goes_on_where_it_was(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    live = LiveRun(recipe, "asleep", tmp_path / "log", "workers.max=1", "workers.spares=false")
    live.wait_for_group(1)
    stopped = live.send(signal.SIGSTOP)
    wait_until(
        lambda: any(s["time"] > stopped + SLEEP_SECONDS for s in live.of_kind("step")),
        PATIENCE,
        f"steps beside a driver that is stopped\n{live.output}",
    )
    live.send(signal.SIGCONT)
    live.wait_for_more(2 * HOT_STEPS)
    interrupt(live)
    assert live.of_kind("fault") == []
    assert live.groups() == 1
    assert_whole(recipe, "asleep", live)


@pytest.mark.matrix
def test_a_stopped_controller_is_replaced_with_its_group(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=STEPS)
    live = LiveRun(recipe, "needed", tmp_path / "log", "workers.max=2")
    live.wait_for_group(1)
    stop_and_see_another(live, "TrainController")
    live.wait_for_group(2, steps=2 * HOT_STEPS)
    stop_and_see_another(live, "ControlChannel")
    live.wait_for_more(2 * HOT_STEPS)
    stop(live, "SplitCoordinator")  # what it has handed out is enough for a while
    live.wait_for_more(2 * HOT_STEPS)
    interrupt(live)
    assert live.of_kind("fault")
    assert all(lost <= HOT_STEPS for lost in live.rolled_back())
    assert_whole(recipe, "needed", live)
