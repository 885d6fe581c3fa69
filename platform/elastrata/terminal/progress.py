"""Progress: a readable line a second or so for steps, and one for all else that happens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from elastrata.training.record import StepRecord
from elastrata.workers.events import (
    Chosen,
    Committed,
    Evaluated,
    Event,
    Halted,
    Lost,
    Started,
    Substituted,
    Warned,
)

_LINE_SECONDS = 1.0
_ETA_STEPS = 50
_TIERS = {"hot": "kept in memory", "durable": "on storage"}


class Progress:
    """Turns events into lines.

    Args:
        steps: of the whole run.
        write: prints a line.
        begins: by number of a step a line about what begins with it.
    """

    def __init__(
        self, steps: int, write: Callable[[str], None], begins: Mapping[int, str] | None = None
    ) -> None:
        self._steps = steps
        self._write = write
        self._begins = begins or {}
        self._printed = 0.0
        self._recent: deque[float] = deque(maxlen=_ETA_STEPS)
        self._step = 0

    def __call__(self, event: Event) -> None:
        """Prints the event's line; step records come too often for a line each."""
        if isinstance(event, StepRecord):
            self._recent.append(event.seconds)
            self._step = event.step
            if event.step in self._begins:
                self._write(self._begins[event.step])
            now = time.monotonic()
            if now - self._printed >= _LINE_SECONDS or event.step in (1, self._steps):
                self._printed = now
                self._write(self._step_line(event))
        else:
            line = _line(event, self._step)
            if line:
                self._write(line)

    def _step_line(self, record: StepRecord) -> str:
        left = (self._steps - record.step) * sum(self._recent) / len(self._recent)
        parts = [
            f"step {record.step:>{len(str(self._steps))}}/{self._steps}",
            f"loss {record.loss:7.4f}",
            f"lr {record.lr:.2e}",
            f"grad {record.gradient_norm:6.3f}",
            f"{_quantity(record.tokens_per_second)} tokens/s",
            f"padding {record.padding:.1%}",
            f"imbalance {record.imbalance:.3f}",
            f"data wait {record.seconds_waiting_for_data / record.seconds:.0%}",
        ]
        if record.mfu is not None:
            parts.append(f"MFU {record.mfu:.1%}")
        if record.bubble is not None:
            memory = "/".join(f"{size / 2**30:.1f}" for size in record.memory_by_stage)
            parts += [f"bubble {record.bubble:.1%}", f"memory {memory} GiB"]
        return "  ".join([*parts, f"ETA {_duration(left)}"])


def _line(event: Event, step: int) -> str | None:
    """A line about an event; None where it is not worth one. `step`: the last one done before."""
    match event:
        case Started():
            workers = "worker" if event.world_size == 1 else "workers"
            since = f" from step {event.step}, {_TIERS[event.state]}" if event.step else ""
            again = f", {step - event.step} steps again" if step > event.step else ""
            count = f"{event.world_size} {workers}"
            return f"training on {count}{since}{again} (attempt {event.attempt})"
        case Evaluated():
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            return f"evaluation after step {event.step}: loss {event.loss:.4f}  {metrics}"
        case Committed():
            return f"checkpoint of step {event.step}: {event.uri}"
        case Halted():
            return f"saved after step {event.step} for a {event.reason}: {event.text}"
        case Lost():
            return f"lost workers: {event.text}; going on from the newest state"
        case Substituted():
            return f"not to be had here: {event.text}"
        case Chosen():
            return (
                f"from step {event.step} on: micro_batch_tokens {event.micro_batch_tokens:,}, "
                f"activation_checkpointing {event.activation_checkpointing} ({event.text})"
            )
        case Warned():
            return f"warning: {event.text}"
        case _:
            return None


def _quantity(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
