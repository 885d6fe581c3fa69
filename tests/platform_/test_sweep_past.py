"""A sweep's past: told again to searcher and scheduler, both go on as if nothing had happened."""

from __future__ import annotations

import math
from itertools import count
from random import random
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher

from elastrata.sweeps.journal import Report, Standings, report_entry
from elastrata.sweeps.scheduler import (
    TOKENS,
    AshaConfig,
    MedianConfig,
    SchedulerConfig,
    build_scheduler,
)
from elastrata.sweeps.search import (
    OptunaConfig,
    RandomConfig,
    SearcherConfig,
    build_searcher,
)
from elastrata.sweeps.space import Domain, LogUniform, Uniform
from elastrata.sweeps.suggestions import Suggestions

SPACE: dict[str, Domain] = {
    "optimizer.lr": LogUniform(loguniform=(1e-4, 1e-2)),
    "clip.max_norm": Uniform(uniform=(0.1, 1.0)),
}
METRIC, TOKENS_OF_A_TRIAL, REPORTS = "eval/loss", 800, 8


class Rehearsal:
    """A sweep without training or Ray: its driver's side alone, one trial at a time."""

    def __init__(
        self,
        searcher: SearcherConfig,
        scheduler: SchedulerConfig,
        entries: list[dict[str, Any]],
        trials: int,
        impossible: str = "",
    ) -> None:
        self.entries = list(entries)
        self.standings = Standings(METRIC, "min", entries)
        common = {"metric": METRIC, "mode": "min"}
        self.suggestions = Suggestions(
            build_searcher(searcher, SPACE, **common),
            build_scheduler(scheduler, SPACE, **common, trial_tokens=TOKENS_OF_A_TRIAL),
            self.standings,
            list(entries),
            trials=trials,
            at_a_time=1,
            problem=lambda id, values: "no" if id == impossible else None,
            note=self.note,
        )

    def note(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self.standings.apply(entry)

    def run(self) -> None:
        """Play Tune: every trial reports until the scheduler stops it, or to its end."""
        scheduler: Any = self.suggestions.scheduler
        for number in count():
            trial = SimpleNamespace(trial_id=f"tune-{number}-{random()}")
            values = self.suggestions.suggest(trial.trial_id)
            if values == Searcher.FINISHED:
                return
            name = self.suggestions.names[trial.trial_id]
            scheduler.on_trial_add(None, trial)
            for place in range(1, REPORTS + 1):
                loss = abs(math.log10(values["optimizer.lr"]) + 3) + values["clip.max_norm"] / place
                tokens = place * TOKENS_OF_A_TRIAL // REPORTS
                report = Report(
                    step=place, samples=place, tokens=tokens, seconds=1.0, metrics={METRIC: loss}
                )
                result = {METRIC: loss, TOKENS: tokens, "training_iteration": place}
                is_last = place == REPORTS
                stops = not is_last and scheduler.on_trial_result(None, trial, result) == "STOP"
                if not (stops or is_last):
                    self.suggestions.on_trial_result(trial.trial_id, result)
                self.note({"kind": "reported", **report_entry(name, report)})
                if stops or is_last:
                    scheduler.on_trial_complete(None, trial, result)
                    self.suggestions.on_trial_complete(trial.trial_id, result)
                    state = "stopped" if stops else "finished"
                    self.note({"kind": "concluded", "trial": name, "state": state, "text": ""})
                    break


@pytest.mark.parametrize(
    ("searcher", "scheduler"),
    [
        (RandomConfig(), AshaConfig(name="asha")),
        (RandomConfig(seed=3), MedianConfig(name="median", min_trials=2)),
        (
            OptunaConfig(name="optuna", startup_trials=3),
            AshaConfig(name="asha", reduction_factor=2),
        ),
    ],
)
def test_three_launches_do_what_one_does(
    searcher: SearcherConfig, scheduler: SchedulerConfig
) -> None:
    undisturbed = Rehearsal(searcher, scheduler, [], 14)
    undisturbed.run()
    entries: list[dict[str, Any]] = []
    for trials in (5, 9, 14):
        launch = Rehearsal(searcher, scheduler, entries, trials)
        launch.run()
        entries = launch.entries
    assert entries == undisturbed.entries
    states = {trial.state for trial in undisturbed.standings.trials.values()}
    assert states == {"finished", "stopped"}


def test_values_that_cannot_be_are_a_failed_trial_and_the_next_ones_come() -> None:
    rehearsal = Rehearsal(RandomConfig(), AshaConfig(name="asha"), [], 4, impossible="0001")
    rehearsal.run()
    states = {id: trial.state for id, trial in rehearsal.standings.trials.items()}
    assert states["0001"] == "failed"
    assert len(states) == 4


def test_the_best_is_that_of_the_newest_values_among_those_that_count() -> None:
    standings = Standings(METRIC, "min")
    for id, value, state in (
        ("0000", 2.0, "stopped"),
        ("0001", 1.0, "finished"),
        ("0002", math.nan, "running"),
        ("0003", 0.5, "diverged"),
    ):
        standings.apply({"kind": "suggested", "trial": id, "values": {}})
        report = Report(step=1, samples=1, tokens=1, seconds=1.0, metrics={METRIC: value})
        standings.apply({"kind": "reported", **report_entry(id, report)})
        standings.apply({"kind": "concluded", "trial": id, "state": state, "text": ""})
    best = standings.best()
    assert best is not None
    assert best.id == "0001"
    assert Standings(METRIC, "max").best() is None
