"""From a step to a run: its hours, what it costs, how much of the devices it uses."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import Layout
from elastrata.planner.memory import Memory
from elastrata.planner.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected of a layout."""

    layout: Layout
    memory: Memory
    time: StepTime
    tokens_per_second: float
    """Of all devices."""
    mfu: float
    """FLOPs of the model (attention halved where causal, no recomputation) over the peak."""
    hours: float
    cost: float | None
    """None where the cluster has no price."""

    @property
    def bubble(self) -> float:
        """Share of the step."""
        return self.time.bubble / self.time.total

    @property
    def exposed(self) -> float:
        """Share of the step in which devices wait for messages."""
        return self.time.messages / self.time.total


def forecast(
    model: ModelSpec,
    cluster: Cluster,
    layout: Layout,
    memory: Memory,
    time: StepTime,
    *,
    batch_size: int,
    steps: int,
) -> Forecast:
    """Puts a run of so many steps together."""
    seconds = time.total
    hours = steps * seconds / 3600
    price = cluster.price
    return Forecast(
        layout=layout,
        memory=memory,
        time=time,
        tokens_per_second=batch_size * model.seq_len / seconds,
        mfu=model.flops_per_sample
        * batch_size
        / (seconds * layout.devices * cluster.device.peak_flops),
        hours=hours,
        cost=None if price is None else price * hours * cluster.devices,
    )
