"""A forecast of a layout: from a step to a run, its hours and cost, and why another is faster."""

from __future__ import annotations

from dataclasses import dataclass

from elastrata.core.model_spec import ModelSpec
from elastrata.planner.cluster import Cluster
from elastrata.planner.layout import Layout
from elastrata.planner.memory import Memory
from elastrata.planner.step_time import StepTime

_WORDS = {
    "matrices": "smaller or fewer matrices",
    "recomputation": "activations computed again",
    "head": "the head's stage",
    "tensor_messages": "tensor-parallel messages",
    "pipeline_messages": "messages between stages",
    "bubble": "the pipeline's bubble",
    "data_messages": "gradients and parameters on their way",
    "update": "the optimizer's update",
    "loading": "reading the data",
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The expectations of a layout."""

    layout: Layout
    memory: Memory
    time: StepTime
    tokens_per_second: float
    """All devices together."""
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

    def why_slower(self, best: Forecast) -> str:
        """The term that costs this layout most, beside what it costs the best one; empty where
        nothing does."""
        lost = {name: vars(self.time)[name] - vars(best.time)[name] for name in _WORDS}
        worst = max(lost, key=lambda name: lost[name])
        total = self.time.total / best.time.total - 1
        if lost[worst] <= 0 or total <= 0:
            return ""
        return f"{total:+.1%}: {_WORDS[worst]} {lost[worst]:+.3g} s"


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
