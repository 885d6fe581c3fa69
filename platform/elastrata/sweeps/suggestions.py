"""The suggestions of a sweep: the trials that Ray Tune is to run, one after the other.

The journal tells what was suggested and reported before. Searcher and scheduler are told the same
again, in the same order, so they go on as if the driver had never died: no snapshot of theirs is
needed, and nothing that is over is run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.experiment.config_parser import _create_trial_from_spec, _make_parser
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.search import Searcher
from ray.tune.search.search_algorithm import SearchAlgorithm

from elastrata.sweeps.domains import Value
from elastrata.sweeps.schedulers import TOKENS
from elastrata.sweeps.standings import CONCLUDED, REPORTED, SUGGESTED, Standings

_ID_DIGITS = 4


class Suggestions(SearchAlgorithm):
    """The algorithm that Tune asks for the next trial.

    Args:
        searcher: Tune's, with the points of the space.
        scheduler: Tune's; it is told what happened before this launch.
        standings: of the sweep; those before this launch at first.
        entries: its journal up to this launch.
        most: trials in all.
        at_a_time: trials that Tune has at a time; the scheduler may want to have all.
        problem: says why a trial with these values cannot be; None: it can.
        note: takes an entry of the journal that happens now.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: Any,
        standings: Standings,
        entries: Sequence[Mapping[str, Any]],
        *,
        most: int,
        at_a_time: int,
        problem: Callable[[str, Mapping[str, Value]], str | None],
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self._searcher, self._scheduler, self._standings = searcher, scheduler, standings
        self._entries = entries
        self._most, self._at_a_time = most, at_a_time
        self._problem, self._note = problem, note
        self._with_tune: set[str] = set()
        self._unfinished: list[TuneTrial] = []
        self._spec: dict[str, Any] = {}
        self._ended = False

    @property
    def total_samples(self) -> int:
        """Trials in all."""
        return self._most

    def add_configurations(self, experiments: Any) -> None:
        """Tune's word of what a trial is; now the past can be told."""
        (experiment,) = experiments
        self._spec = experiment.spec
        self._tell_the_past()

    def next_trial(self) -> TuneTrial | None:
        """The next one to run; None: not now, or none is left."""
        if len(self._with_tune) >= self._at_a_time:
            return None
        if self._unfinished:
            trial = self._unfinished.pop(0)
            self._with_tune.add(trial.trial_id)
            return trial
        while len(self._standings.trials) < self._most:
            id = f"{len(self._standings.trials):0{_ID_DIGITS}d}"
            values: Any = self._searcher.suggest(id)
            if values == Searcher.FINISHED:
                break
            if values is None:
                return None
            self._note({"kind": SUGGESTED, "trial": id, "values": values})
            if problem := self._problem(id, values):
                self._note({"kind": CONCLUDED, "trial": id, "state": "failed", "text": problem})
                self._searcher.on_trial_complete(id, error=True)
                continue
            self._with_tune.add(id)
            return self._made(id, values)
        self._ended = True
        return None

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Tells the searcher."""
        self._searcher.on_trial_result(trial_id, result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Tells the searcher; a trial without a value has failed."""
        self._with_tune.discard(trial_id)
        value = (result or {}).get(self._standings.metric)
        failed = error or value is None or value != value
        self._searcher.on_trial_complete(trial_id, None if failed else result, error=failed)

    def is_finished(self) -> bool:
        """Whether there are no more."""
        return self._ended or bool(self._finished)

    def _made(self, id: str, values: Mapping[str, Value]) -> TuneTrial:
        spec = {**self._spec, "config": dict(values)}
        made: TuneTrial = _create_trial_from_spec(
            spec, _make_parser(), evaluated_params=dict(values), experiment_tag=id, trial_id=id
        )
        return made

    def _tell_the_past(self) -> None:
        """Searcher and scheduler hear of everything again, as it came."""
        told: dict[str, Any] = {}
        newest: dict[str, dict[str, Any]] = {}
        last = {
            e["trial"]: number for number, e in enumerate(self._entries) if e["kind"] == REPORTED
        }
        replays = not isinstance(self._scheduler, PopulationBasedTraining)
        for number, entry in enumerate(self._entries):
            match entry["kind"]:
                case "suggested":
                    id = entry["trial"]
                    self._searcher.suggest(id)
                    trial = self._standings.trials[id]
                    told[id] = _Past(id) if trial.is_over else self._made(id, trial.values)
                    if replays:
                        self._scheduler.on_trial_add(None, told[id])
                case "reported":
                    id = entry["trial"]
                    newest[id] = _result(entry, newest.get(id))
                    ended = self._standings.trials[id].state == "finished" and number == last[id]
                    if replays and not ended:
                        self._scheduler.on_trial_result(None, told[id], newest[id])
                    self._searcher.on_trial_result(id, newest[id])
                case "concluded":
                    id = entry["trial"]
                    failed = entry["state"] in ("diverged", "failed")
                    result = None if failed else newest.get(id)
                    self._searcher.on_trial_complete(id, result, error=failed)
                    if replays and result:
                        self._scheduler.on_trial_complete(None, told[id], result)
        self._unfinished = [trial for trial in told.values() if isinstance(trial, TuneTrial)]


@dataclass(frozen=True, eq=False)
class _Past:
    """All that schedulers ask of a trial that is over."""

    trial_id: str


def _result(entry: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """A report as Tune hands it on, after the one before it."""
    iteration = before["training_iteration"] + 1 if before else 1
    return {**entry["metrics"], TOKENS: entry["tokens"], "training_iteration": iteration}
