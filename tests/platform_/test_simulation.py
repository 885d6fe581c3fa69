"""Runs in simulated time: traces, the accounting, and the best interval between checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from elastrata.cli.main import run
from elastrata.recipe.file import load_recipe
from elastrata.simulation.simulate import (
    Conditions,
    Outcome,
    Pace,
    RecoverySeconds,
    Run,
    daly_seconds,
    read_recovery,
    step_seconds,
    sweep,
    young_seconds,
)
from elastrata.simulation.trace import Event, Rates, read_trace, sample_events
from elastrata_pipelines.errors import UserError
from support.documented import documented_keys
from support.synthetic import write_data_set

FAULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.json"
DAY = 86_400.0
PLAIN = Conditions(
    steps=1000,
    step_seconds=lambda workers: 8 / workers,
    workers_min=1,
    workers_max=4,
    checkpoint_every=100,
    checkpoint_seconds=0.0,
    save_seconds=0.0,
    hot_every=10,
    hot_seconds=0.0,
    hot_save_seconds=0.0,
    resize_seconds=60.0,
    recovery=RecoverySeconds(killed=5.0, lost=20.0, drained=10.0, joined=15.0, driver=30.0),
)


def _replay(events: Iterable[Event], at: Conditions = PLAIN, days: float = 1) -> Outcome:
    return Run(at).replay(events, days * DAY)


def test_an_undisturbed_run_takes_its_steps_and_its_start() -> None:
    found = _replay([Event(0, "join", 4)])
    assert (found.finished, found.steps) == (True, 1000)
    assert found.seconds == pytest.approx(15 + 1000 * 2)
    assert found.goodput == pytest.approx(2000 / 2015)


def test_a_lost_worker_costs_its_recovery_and_the_steps_since_the_newest_copy() -> None:
    # At second 15 + 2 * 57 the run has done 57 steps; the newest hot copy is of step 50.
    found = _replay([Event(0, "join", 4), Event(129, "lose")])
    assert found.lost_steps == 7
    assert found.seconds == pytest.approx(129 + 20 + (1000 - 50) * 8 / 3)
    assert [size for _, size in found.sizes] == [4, 3]


def test_a_drained_worker_loses_nothing() -> None:
    found = _replay([Event(0, "join", 4), Event(129, "drain")])
    assert found.lost_steps == 0
    assert found.seconds == pytest.approx(129 + 10 + (1000 - 57) * 8 / 3)


def test_the_drivers_loss_goes_back_to_the_durable_checkpoint() -> None:
    found = _replay([Event(0, "join", 4), Event(15 + 2 * 157, "driver")])
    assert found.lost_steps == 57


def test_a_run_with_too_few_workers_waits() -> None:
    at = replace(PLAIN, workers_min=4)
    found = _replay([Event(0, "join", 3), Event(500, "join", 1)], at)
    assert found.seconds_waiting == pytest.approx(500)
    assert found.finished


def test_the_time_is_accounted_for() -> None:
    rates = Rates(lost_per_hour=2.0, with_notice=0.3, hours_away=0.2, driver_lost_per_hour=0.5)
    at = replace(PLAIN, steps=10**6, checkpoint_seconds=0.3, hot_seconds=0.1, save_seconds=5.0)
    found = _replay(sample_events(4, rates, seconds=DAY, seed=1), at)
    assert found.faults.keys() == {"lose", "drain", "driver"}
    parts = (
        found.useful_seconds,
        found.seconds_again,
        found.seconds_recovering,
        found.seconds_saving,
        found.seconds_waiting,
    )
    assert min(parts[:4]) > 0
    assert sum(parts) == pytest.approx(found.seconds)
    assert found.worker_seconds <= 4 * found.seconds


def test_every_mistake_of_a_trace_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "seconds,event,workers\n0,join,8\n60,loose,1\nsoon,lose,1\n5,drain,x\n7,lose\n",
        encoding="utf-8",
    )
    with pytest.raises(UserError) as found:
        read_trace(str(path))
    told = found.value.problems
    assert told[0].startswith(f"{path}:3: event: 'loose': expected join, lose")
    assert "did you mean 'lose'?" in told[0]
    assert told[1].startswith(f"{path}:4: seconds: 'soon'")
    assert told[2].startswith(f"{path}:5: workers: 'x'")
    assert told[3].startswith(f"{path}:6: 2 values")


def test_the_default_recovery_is_what_was_measured() -> None:
    assert read_recovery(str(FAULTS)) == RecoverySeconds()


def test_the_formulas() -> None:
    assert young_seconds(10, 7200) == pytest.approx(379.47, abs=0.01)
    assert daly_seconds(10, 7200) == pytest.approx(372.8, abs=0.5)
    assert daly_seconds(10, 4) == 4


def test_the_best_interval_is_near_youngs() -> None:
    at = replace(
        PLAIN,
        steps=10**9,
        step_seconds=lambda workers: 1.0,
        hot_every=0,
        checkpoint_seconds=10.0,
        recovery=replace(PLAIN.recovery, lost=1.0),
    )
    rates = Rates(lost_per_hour=0.25, hours_away=0.0)

    def events() -> Iterable[Event]:
        return sample_events(4, rates, seconds=60 * DAY, seed=5)

    found = sweep(at, events, seconds=60 * DAY)
    assert found is not None
    assert 0.5 <= found.best / found.young <= 2
    nearest = min(found.goodput, key=lambda interval: abs(interval - found.daly))
    assert found.goodput[nearest] >= found.goodput[found.best] - 0.002


def test_the_deal_paces_the_steps(tmp_path: Path) -> None:
    write_data_set(tmp_path, samples=400)
    recipe = load_recipe("bert/tiny", [f"data.path={tmp_path}", "batch_size=32"])
    seconds = step_seconds(recipe, Pace(worker_seconds=32.0, fixed_seconds=1.0), group=1)
    assert seconds(1) == pytest.approx(33.0)
    assert 1 + 32 / 8 < seconds(8) < 1.3 * (1 + 32 / 8)
    assert seconds(64) > 1 + 32 / 64  # more workers than samples: some have none


def test_the_command_tells_goodput_cost_and_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "spot.yaml"
    cluster.write_text("device: A100\ndevices: 8\nprice: 2.0\nspot_price: 0.8\n", encoding="utf-8")
    changes = ["steps=20_000", "checkpoint.hot_steps=0", f"data.path={tmp_path / 'none'}"]
    options = ["--cluster", str(cluster), "--lost-per-hour", "0.2", "--intervals", "--json"]
    picture = ["--plot", str(tmp_path / "workers.png"), "--step-seconds", "2"]
    assert run(["simulate", "bert/tiny", *changes, *options, *picture]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert list(result) == documented_keys("simulate")
    assert result["finished"] is True
    assert 0 < result["goodput"] < 1
    assert 0.3 < result["cost"] / result["cost_on_demand"] < 0.8
    assert result["intervals"]["best"] in map(int, result["intervals"]["goodput"])
    assert (tmp_path / "workers.png").stat().st_size > 5_000
