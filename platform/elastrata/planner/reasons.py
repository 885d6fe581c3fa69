"""Why a layout loses against the best, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elastrata.planner.forecast import Forecast

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


def why_slower(best: Forecast, other: Forecast) -> str:
    """The term that costs `other` most, beside what it costs `best`.

    Empty where nothing does.
    """
    lost = {name: vars(other.time)[name] - vars(best.time)[name] for name in _WORDS}
    worst = max(lost, key=lambda name: lost[name])
    total = other.time.total / best.time.total - 1
    if lost[worst] <= 0 or total <= 0:
        return ""
    return f"{total:+.1%}: {_WORDS[worst]} {lost[worst]:+.3g} s"
