"""Gauges of a run for Prometheus, through Ray's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ray.util.metrics import Counter, Gauge

from elastrata.run.goodput import Goodput
from elastrata.step.events import Committed, Evaluated, Event, Lost, Started
from elastrata.step.records import StepRecord, losses_by_set, losses_by_source
from elastrata_pipelines.errors import UserError

GAUGES: Mapping[str, str] = {
    "elastrata_step": "Optimizer steps done",
    "elastrata_loss": "Training loss of the last step",
    "elastrata_tokens_per_second": "Real tokens per second, over all workers",
    "elastrata_mfu": "Share of the devices' dense bf16 peak; absent if the peak is unknown",
    "elastrata_imbalance": "Largest work of a rank divided by the mean",
    "elastrata_slowest_rank": "Slowest rank in the last step, by its own computing time",
    "elastrata_time_imbalance": "Time of the slowest rank divided by the mean",
    "elastrata_seconds_waiting_for_data": "Seconds that rank 0 waited for data in the last step",
    "elastrata_world_size": "Number of workers that train",
    "elastrata_evaluation_loss": "Loss on the held-out data in the last evaluation",
}
"""Metrics of a run and their descriptions."""
BY_SOURCE: Mapping[str, str] = {
    "elastrata_source_share": "Share of a source in the tokens of the last step",
    "elastrata_source_loss": "Training loss of a source in the last step with samples of it",
    "elastrata_source_evaluation_loss": "Loss on held-out data of a source in the last evaluation",
}
"""Metrics of a mixture, with the label `source`."""
BY_SET: Mapping[str, str] = {
    "elastrata_set_evaluation_loss": "Loss on an additional held-out set in the last evaluation",
}
"""Metrics of `evaluation.sets`, with the label `set`."""
BY_USE: Mapping[str, str] = {
    "elastrata_goodput_seconds": "Seconds of the run by use: productive steps and others; as of "
    "the last durable checkpoint or change of workers",
}
"""Metrics with the label `use`: the fields of `Goodput`."""
COUNTERS: Mapping[str, str] = {
    "elastrata_faults": "Worker groups lost since the driver started",
    "elastrata_checkpoints": "Durable checkpoints taken since the driver started",
}
"""Counters and their descriptions. Ray adds the prefix `ray_` to all metrics, and `_total` to
counters."""


class Gauges:
    """The gauges of one run, with the label `run`.

    Args:
        run: name of the run.
        account: returns the seconds of the run by use; may be slow if the history is long.
    """

    def __init__(self, run: str, account: Callable[[], Goodput]) -> None:
        self._account, self._next_account = account, 0.0
        self._gauges = {name: Gauge(name, text, tag_keys=("run",)) for name, text in GAUGES.items()}
        self._counters = {
            name: Counter(name, text, tag_keys=("run",)) for name, text in COUNTERS.items()
        }
        self._by_source = {
            name: Gauge(name, text, tag_keys=("run", "source")) for name, text in BY_SOURCE.items()
        }
        self._by_set = {
            name: Gauge(name, text, tag_keys=("run", "set")) for name, text in BY_SET.items()
        }
        self._by_use = {
            name: Gauge(name, text, tag_keys=("run", "use")) for name, text in BY_USE.items()
        }
        all_metrics = self._gauges, self._by_source, self._by_set, self._by_use, self._counters
        for metric in (metric for kind in all_metrics for metric in kind.values()):
            metric.set_default_tags({"run": run})

    def __call__(self, event: Event) -> None:
        """Update the metrics from an event."""
        match event:
            case StepRecord():
                self._set(
                    step=event.step,
                    loss=event.loss,
                    tokens_per_second=event.tokens_per_second,
                    mfu=event.mfu,
                    imbalance=event.imbalance,
                    slowest_rank=event.slowest_rank,
                    time_imbalance=event.time_imbalance,
                    seconds_waiting_for_data=event.seconds_waiting_for_data,
                    world_size=event.world_size,
                )
                self._set_sources(event)
            case Evaluated():
                self._set_evaluation(event)
            case Started():
                self._set(world_size=event.world_size)
                self._set_goodput()
            case Lost():
                self._set(world_size=0)
                self._counters["elastrata_faults"].inc()
            case Committed():
                self._counters["elastrata_checkpoints"].inc()
                self._set_goodput()
            case _:
                pass

    def _set_sources(self, record: StepRecord) -> None:
        losses = record.losses_by_source
        for name, tokens in record.batch_tokens_by_source.items():
            tags = {"source": name}
            self._by_source["elastrata_source_share"].set(tokens / record.batch_tokens, tags)
            if name in losses:
                self._by_source["elastrata_source_loss"].set(losses[name], tags)

    def _set_evaluation(self, event: Evaluated) -> None:
        self._set(evaluation_loss=event.loss)
        metrics = event.to_metrics()
        for name, loss in losses_by_source(metrics).items():
            self._by_source["elastrata_source_evaluation_loss"].set(loss, {"source": name})
        for name, loss in losses_by_set(metrics).items():
            self._by_set["elastrata_set_evaluation_loss"].set(loss, {"set": name})

    def _set_goodput(self) -> None:
        """Update the goodput gauges, at most 1% of the time."""
        started = time.monotonic()
        if started < self._next_account:
            return
        try:
            seconds = self._account().to_metrics(prefix="")
        except (UserError, OSError):  # a gauge does not end a run
            seconds = {}
        for use, value in seconds.items():
            self._by_use["elastrata_goodput_seconds"].set(value, {"use": use})
        now = time.monotonic()
        # Reading the history gets slower as it grows.
        self._next_account = now + 100 * (now - started)

    def _set(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._gauges[f"elastrata_{name}"].set(value)
