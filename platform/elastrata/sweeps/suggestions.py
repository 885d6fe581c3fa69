"""The suggestions of a sweep: the trials that Ray Tune runs, one after the other.

The journal holds the suggestions and reports of earlier launches. A new launch replays them to the
searcher and the scheduler in the same order, so that they continue as if the driver had never died.
No snapshot is needed, and no finished trial runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial as TuneTrial
from ray.tune.schedulers import FIFOScheduler, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from elastrata.sweeps.journal import CONCLUDED, REPORTED, SUGGESTED, Standings
from elastrata.sweeps.scheduler import TOKENS
from elastrata.sweeps.space import Value

_ID_DIGITS = 4


class TrialNames(dict[str, str]):
    """Ids of trials in the sweep by Tune's random ids; Tune calls it for the names of trials."""

    def __call__(self, trial: TuneTrial) -> str:
        """Return the id of a trial."""
        return self[trial.trial_id]


@dataclass(frozen=True)
class TrialId:
    """Stand-in for a Tune trial: schedulers read only its id, except population based training."""

    trial_id: str


class NamedTrialScheduler(FIFOScheduler):
    """Scheduler that identifies trials by their ids in the sweep, which outlive a launch.

    Args:
        scheduler: Tune's scheduler.
        names: the ids of the trials.
    """

    def __init__(self, scheduler: TrialScheduler, names: TrialNames) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inner: Any = scheduler
        self._names = names
        self._added: set[str] = set()

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """Pass the metric and mode on."""
        return bool(self._inner.set_search_properties(metric, mode, **spec))

    def add(self, id: str) -> None:
        """Add a trial unless it is known."""
        if id not in self._added:
            self._added.add(id)
            self._inner.on_trial_add(None, TrialId(id))

    def on_trial_add(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Add a trial of Tune, which may have been added by the replay."""
        self.add(self._names(trial))

    def on_trial_result(
        self, tune_controller: Any, trial: TuneTrial | TrialId, result: dict[str, Any]
    ) -> str:
        """Pass a report on, and return the scheduler's decision."""
        decision: str = self._inner.on_trial_result(
            tune_controller, self._to_trial_id(trial), result
        )
        return decision

    def on_trial_complete(
        self, tune_controller: Any, trial: TuneTrial | TrialId, result: dict[str, Any]
    ) -> None:
        """Pass on that a trial has ended."""
        self._inner.on_trial_complete(tune_controller, self._to_trial_id(trial), result)

    def on_trial_error(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Pass on that a trial failed."""
        self._inner.on_trial_error(tune_controller, self._to_trial_id(trial))

    def on_trial_remove(self, tune_controller: Any, trial: TuneTrial) -> None:
        """Pass on that a waiting trial was removed."""
        self._inner.on_trial_remove(tune_controller, self._to_trial_id(trial))

    def _to_trial_id(self, trial: TuneTrial | TrialId) -> TrialId:
        return trial if isinstance(trial, TrialId) else TrialId(self._names(trial))


class Suggestions(Searcher):
    """Searcher that Tune asks for the next trial.

    Args:
        searcher: Tune's searcher for the points of the space.
        scheduler: Tune's scheduler.
        standings: the sweep's standings; at first those of earlier launches.
        entries: the journal of earlier launches.
        trials: number of trials in all.
        at_a_time: number of concurrent trials; some schedulers need all of them.
        problem: returns why a trial with these values is impossible, or None.
        note: called with each new entry for the journal.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: TrialScheduler,
        standings: Standings,
        entries: Sequence[Mapping[str, Any]],
        *,
        trials: int,
        at_a_time: int,
        problem: Callable[[str, Mapping[str, Value]], str | None],
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        super().__init__(metric=standings.metric, mode=standings.mode)
        self.names = TrialNames()
        # Population based training clones Tune's own trials, and starts anew with each launch.
        is_pbt = isinstance(scheduler, PopulationBasedTraining)
        self.scheduler = scheduler if is_pbt else NamedTrialScheduler(scheduler, self.names)
        """The scheduler for Tune to use."""
        self._searcher, self._standings = searcher, standings
        self._trials, self._at_a_time = trials, at_a_time
        self._problem, self._note = problem, note
        self._running: set[str] = set()
        self._replay(entries)
        self._unfinished = [id for id, trial in standings.trials.items() if not trial.is_over]

    def suggest(self, trial_id: str) -> Any:
        """Return the values of the next trial; None while no further trial can run."""
        if len(self._running) >= self._at_a_time:
            return None
        # Trials that an earlier launch left unfinished continue first.
        if self._unfinished:
            id = self._unfinished.pop(0)
            return self._start(trial_id, id, self._standings.trials[id].values)
        while len(self._standings.trials) < self._trials:
            id = f"{len(self._standings.trials):0{_ID_DIGITS}d}"
            values: Any = self._searcher.suggest(id)
            if values == Searcher.FINISHED:
                break
            # The searcher may suggest more once it has more results.
            if values is None:
                return None
            self._note({"kind": SUGGESTED, "trial": id, "values": values})
            if problem := self._problem(id, values):
                self._note({"kind": CONCLUDED, "trial": id, "state": "failed", "text": problem})
                self._searcher.on_trial_complete(id, error=True)
                continue
            return self._start(trial_id, id, values)
        return Searcher.FINISHED

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Pass a report to the searcher."""
        self._searcher.on_trial_result(self.names[trial_id], result)

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Pass the result to the searcher; a trial without a value counts as failed."""
        id = self.names[trial_id]
        self._running.discard(id)
        value = (result or {}).get(self._standings.metric)
        # NaN is the only value that differs from itself.
        has_failed = error or value is None or value != value
        self._searcher.on_trial_complete(id, None if has_failed else result, error=has_failed)

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        """Do nothing: the journal holds the whole state."""

    def _start(self, trial_id: str, id: str, values: Mapping[str, Value]) -> dict[str, Value]:
        self.names[trial_id] = id
        self._running.add(id)
        return dict(values)

    def _replay(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Replay earlier launches to the searcher and the scheduler, in the original order."""
        newest: dict[str, dict[str, Any]] = {}
        reports = [(place, e["trial"]) for place, e in enumerate(entries) if e["kind"] == REPORTED]
        last = {id: place for place, id in reports}
        scheduler = self.scheduler if isinstance(self.scheduler, NamedTrialScheduler) else None
        for place, entry in enumerate(entries):
            id = entry.get("trial", "")
            match entry["kind"]:
                case "suggested":
                    self._searcher.suggest(id)
                    if scheduler:
                        scheduler.add(id)
                case "reported":
                    newest[id] = _tune_result(entry, newest.get(id))
                    # Tune does not ask the scheduler about the report that ends a trial.
                    is_last_report = (
                        self._standings.trials[id].state == "finished" and place == last[id]
                    )
                    if scheduler and not is_last_report:
                        scheduler.on_trial_result(None, TrialId(id), newest[id])
                    self._searcher.on_trial_result(id, newest[id])
                case "concluded":
                    has_failed = entry["state"] in ("diverged", "failed")
                    result = None if has_failed else newest.get(id)
                    self._searcher.on_trial_complete(id, result, error=has_failed)
                    if scheduler and result:
                        scheduler.on_trial_complete(None, TrialId(id), result)


def _tune_result(entry: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a report in the form in which Tune passes it on after the previous one."""
    iteration = before["training_iteration"] + 1 if before else 1
    return {**entry["metrics"], TOKENS: entry["tokens"], "training_iteration": iteration}
