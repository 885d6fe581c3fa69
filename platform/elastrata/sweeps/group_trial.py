"""The trial of several workers: an elastic run like any other, whose events become reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread

from elastrata.cluster.interrupt import Interrupt
from elastrata.core.events import Evaluated, Event
from elastrata.core.record import StepRecord
from elastrata.core.target import is_over
from elastrata.launch.launch import train
from elastrata.recipe.recipe import Recipe
from elastrata.sweeps.past import Past, curve
from elastrata.sweeps.standings import Report
from elastrata.tracking.tracker import SilentTracker
from elastrata_pipelines.storage import Storage


class GroupTrial:
    """A run on Ray Train, in a thread of this process. It takes no part in the cluster's CPUs.

    Args:
        recipe: what to train; its storage holds the run.
        name: of the run.
        told: evaluations up to this step were reported before; later ones that the run already has
            are reported first.
    """

    def __init__(self, recipe: Recipe, name: str, told: int = 0) -> None:
        self._recipe, self._name = recipe, name
        past = Past.of(Storage(recipe.storage).sub(name)).reports()
        self._past = [r for r in past if r.step > told or self._is_end(r.step, r.metrics)]
        self._events: SimpleQueue[Event | None] = SimpleQueue()
        self._interrupt = Interrupt()
        self._raised: Exception | None = None
        self._newest: StepRecord | None = None
        self._thread = Thread(target=self._run, name="elastrata-trial", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """Waits for the next evaluation.

        Raises:
            Exception: what ended the run.
        """
        if self._past and not self._is_end(self._past[0].step, self._past[0].metrics):
            return self._past.pop(0)
        steps: list[Mapping[str, float]] = []
        seconds = 0.0
        while event := self._events.get():
            if isinstance(event, StepRecord):
                steps.append(curve(event))
                seconds += event.seconds
                self._newest = event
            elif isinstance(event, Evaluated) and self._newest:
                metrics = event.to_metrics()
                is_last = self._is_end(event.step, metrics)
                if is_last:
                    self._end()
                return Report(
                    step=event.step,
                    samples=self._newest.samples,
                    tokens=self._newest.tokens,
                    seconds=seconds + event.seconds,
                    metrics=metrics,
                    steps=tuple(steps),
                    state="finished" if is_last else "running",
                )
        self._end()  # nothing was left to do, but for the last report
        return replace(self._past[-1], state="finished")

    def close(self) -> None:
        """Saves, and ends it where it is."""
        self._interrupt.ask("the end of the trial")
        self._thread.join()

    def _is_end(self, step: int, metrics: Mapping[str, float]) -> bool:
        recipe = self._recipe
        return is_over(step, metrics, steps=recipe.steps_in_all, target=recipe.target)

    def _end(self) -> None:
        self._thread.join()
        if self._raised:
            raise self._raised

    def _run(self) -> None:
        try:
            train(
                self._recipe,
                name=self._name,
                show=self._events.put,
                interrupt=self._interrupt,
                record=SilentTracker(),
            )
        except KeyboardInterrupt:
            pass  # it was asked to end
        except Exception as error:
            self._raised = error
        finally:
            self._events.put(None)
