"""The report on a plan: the best layouts, why the others lose, and where every second goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.planner.forecast import Forecast
    from elastrata.planner.group import AutomaticPlan
    from elastrata.planner.plan import Plan

_GIB = 2**30
_TERMS = {
    "parameters": "parameters and optimizer states of this device",
    "gathered": "whole parameters of the blocks that are computed",
    "gradients": "gradients: added up, reduced, and on their way",
    "activations": "kept by the blocks for the backward pass",
    "working": "the block that is computed again; logits and loss",
    "reserved": "driver, kernels, communication library",
    "fragmentation": "an allowance for the allocator",
    "building": "before the first step, while the model is made; not added to the others",
    "matrices": "forward and backward, over all micro-batches",
    "recomputation": "activations computed again",
    "head": "logits and loss, as far as they make the last stage the slowest",
    "tensor_messages": "sums of hidden states in every block",
    "pipeline_messages": "hidden states from stage to stage",
    "bubble": "stages with nothing to do",
    "data_messages": "parameters and gradients that no computation hides",
    "update": "the optimizer",
    "loading": "data that no computation hides",
}


def show_plan(console: Console, plan: Plan, best: Sequence[Forecast]) -> None:
    """The best layouts in a table, with what makes each slower than the first."""
    show_table(console, best)
    console.print(
        f"\n{len(plan.result.forecasts):,} layouts fit, {len(plan.result.families):,} ways to "
        f"divide the model; {plan.result.too_large:,} need more memory than a device has",
        markup=False,
    )


def show_table(console: Console, best: Sequence[Forecast]) -> None:
    """The best layouts, a line each."""
    headings = (
        "layout",
        "GiB",
        "s/step",
        "tokens/s",
        "MFU",
        "bubble",
        "exposed",
        "hours",
        "cost",
        "",
    )
    rows = [headings, *(_cells(best[0], forecast) for forecast in best)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers, why in rows:
        cells = [first.ljust(widths[0])]
        cells += [n.rjust(width) for n, width in zip(numbers, widths[1:-1], strict=True)]
        console.print("  ".join([*cells, why]).rstrip(), markup=False)


def _cells(best: Forecast, forecast: Forecast) -> tuple[str, ...]:
    return (
        str(forecast.layout),
        f"{forecast.memory.total / _GIB:.1f}",
        f"{forecast.time.total:.4g}",
        f"{forecast.tokens_per_second:,.0f}",
        f"{forecast.mfu:.1%}",
        f"{forecast.bubble:.1%}",
        f"{forecast.exposed:.1%}",
        f"{forecast.hours:,.1f}",
        "" if forecast.cost is None else f"{forecast.cost:,.0f}",
        forecast.why_slower(best),
    )


def show_terms(console: Console, plan: Plan, forecast: Forecast) -> None:
    """Every term of one layout's memory and time, and the figures that they are computed from."""
    device, efficiency = plan.cluster.device, plan.machine.efficiency
    for line in terms_lines(forecast):
        console.print(line, markup=False)
    console.print(
        f"\n{device.name}: {device.peak_flops / 1e12:.4g} TFLOP/s {device.peak.dtype}, "
        f"{device.memory_bandwidth / 1e9:,.0f} GB/s of memory, {device.link / 1e9:g} GB/s over "
        f"{device.link_name}, {device.network / 1e9:g} GB/s to other nodes ({device.source})\n"
        f"reached: {efficiency.matmul:.0%} by matrix products that fill it, "
        f"{efficiency.memory:.0%} of the memory, {efficiency.attention:.0%} by flash attention, "
        f"{efficiency.link:.0%} of the link, {efficiency.network:.0%} of the network",
        markup=False,
    )


def show_automatic(console: Console, plan: Plan, planned: AutomaticPlan) -> None:
    """Prints the keys that the recipe leaves open, as a group on all devices would choose them."""
    fits = "" if planned.fits else ", which is too much"
    is_open = planned.gradient_sync != "step"
    synced = f", parallel.gradient_sync {planned.gradient_sync}" if is_open else ""
    console.print(
        f"\nauto, where the recipe's own layout has all devices ({planned.layout}): "
        f"micro_batch_tokens {planned.micro_batch_tokens:,}, activation_checkpointing "
        f"{planned.activation_checkpointing}{synced}: {planned.memory_bytes / _GIB:.1f} GiB of "
        f"{plan.cluster.device.memory_bytes / _GIB:.1f}{fits}; the run begins with what needs "
        "least and goes by what its first steps measure",
        markup=False,
    )


def show_rehearsals(
    console: Console, best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> None:
    """A line for each layout that was rehearsed."""
    console.print("\nrehearsed, on GPUs that are not there")
    for forecast, figures in zip(best, rehearsals, strict=True):
        said = "this version cannot train under it" if figures is None else _rehearsed(figures)
        console.print(f"  {forecast.layout}: {said}", markup=False)


def _rehearsed(figures: Mapping[str, Any]) -> str:
    fullest = max(figures["ranks"], key=lambda rank: rank["peak_bytes"])
    peak, plan = fullest["peak_bytes"], fullest["planned_bytes"]
    sent = sum(message["bytes"] for message in fullest["messages"])
    count = sum(message["count"] for message in fullest["messages"])
    return (
        f"runs; {peak / _GIB:.2f} GiB at the peak ({plan / peak - 1:+.1%} by the plan), "
        f"{count:,} messages of {sent / 1e9:.3g} GB a step, "
        f"{sum(wait['count'] for wait in fullest['waits']):,} waits for the device"
    )


def plan_result(
    plan: Plan, best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """The plan as JSON values.

    Args:
        plan: all of it.
        best: the layouts that are told.
        rehearsals: of each; None where it was not rehearsed.
    """
    return {
        "device": plan.cluster.device.name,
        "devices": plan.cluster.devices,
        "per_node": plan.cluster.per_node,
        "parameters": plan.model.parameters,
        "batch_size": plan.batch_size,
        "steps": plan.steps,
        "seq_len": plan.model.seq_len,
        "fitting": len(plan.result.forecasts),
        "too_large": plan.result.too_large,
        "layouts": layout_results(best, rehearsals),
        "kinds": [],
    }


def layout_results(
    best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> list[dict[str, Any]]:
    """The layouts that are told, as JSON values."""
    return [
        {
            "layout": asdict(forecast.layout),
            "memory_bytes": forecast.memory.total,
            "step_seconds": forecast.time.total,
            "tokens_per_second": forecast.tokens_per_second,
            "mfu": forecast.mfu,
            "bubble": forecast.bubble,
            "exposed": forecast.exposed,
            "hours": forecast.hours,
            "cost": forecast.cost,
            "memory": asdict(forecast.memory),
            "time": asdict(forecast.time),
            "why_not": forecast.why_slower(best[0]),
            "rehearsed": rehearsed,
        }
        for forecast, rehearsed in zip(best, rehearsals, strict=True)
    ]


def terms_lines(forecast: Forecast) -> list[str]:
    """Every term of a layout's memory and time."""
    return [
        f"\n{forecast.layout}\n\nmemory, GiB",
        *(
            f"  {name:<18}{value / _GIB:9.3f}  {_TERMS[name]}"
            for name, value in asdict(forecast.memory).items()
        ),
        "\ntime, seconds a step",
        *(
            f"  {name:<18}{value:9.4f}  {_TERMS[name]}"
            for name, value in asdict(forecast.time).items()
        ),
    ]
