"""The reports on measurements, as `elastrata bench` shows them to people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from elastrata.terminal.stage_progress import quantity

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.bench.input import InputFigures
    from elastrata.bench.measurement import Quartiles
    from elastrata.bench.reduction import ReductionFigures
    from elastrata.bench.step import StepFigures
    from elastrata_pipelines.balance import Balance

_PHASES = {
    "collating": "collating",
    "forward_backward": "forward and backward",
    "clip_optimizer": "clipping and optimizer",
}


def show_step(console: Console, figures: StepFigures) -> None:
    """Prints how fast one device does a recipe's steps."""
    rows = {
        "sequences/s": _three(figures.sequences_per_second, "{:,.4g}"),
        "real tokens/s": _three(figures.tokens_per_second, "{:,.0f}"),
        "positions/s": _three(figures.positions_per_second, "{:,.0f}"),
    }
    if figures.mfu and figures.peak_flops:
        rows["MFU"] = _three(figures.mfu, "{:.1%}")
    rows["seconds a step"] = _three(figures.seconds, "{:.4g}")
    for name, phase in figures.seconds_by_phase.items():
        rows[f"  {_PHASES[name]}"] = _three(phase, "{:.4g}")
    _table(console, ("", "median", "lower", "upper quartile"), rows)
    if figures.peak_flops:
        peak = f"{figures.peak_flops / 1e12:.0f} TFLOP/s of {figures.device}"
        console.print(f"\nMFU          of {peak}: {figures.mfu_convention}", markup=False)
    else:
        console.print(
            f"\nMFU          none: the peak of {figures.device} is not known", markup=False
        )
    console.print(f"padding      {figures.padding:.1%} of the positions")
    console.print(f"FLOPs        {figures.flops_per_token:.4g} per real token")
    console.print(f"memory       {figures.peak_memory_bytes / 2**30:.2f} GiB at most")
    console.print(f"warm-up      {figures.seconds_warming_up:.1f} s")
    console.print(f"loss         {figures.loss:.4f} at the last step")
    for line in figures.substitutions:
        console.print(f"lacking      {line}", style="yellow", markup=False)


def show_input(console: Console, figures: InputFigures) -> None:
    """Prints how fast the input pipeline is."""
    plural = "s" * (figures.workers > 1)
    console.print(
        f"through {figures.through}, to {figures.workers} worker{plural}: "
        f"{quantity(figures.tokens)} tokens in {figures.steps:,} steps, {figures.seconds:.3g} s\n"
        f"tokens/s     {quantity(figures.tokens_per_second)}\n"
        f"first batch  {figures.seconds_to_first_batch:.3g} s"
    )


def show_balances(console: Console, balances: Mapping[int, Balance]) -> None:
    """Prints the largest work of a worker over the mean, by number of workers."""
    headings = ("workers", "max/mean", "worst", "least possible", "random", "micro-batches")
    rows = {
        f"{workers:,}": (
            f"{balance.imbalance_max_over_mean:.4f}",
            f"{balance.imbalance_worst:.4f}",
            f"{balance.imbalance_least:.4f}",
            f"{balance.imbalance_random:.4f}",
            f"{balance.micro_batches:.3g}",
        )
        for workers, balance in balances.items()
    }
    _table(console, headings, rows)


def show_reduction(console: Console, figures: ReductionFigures) -> None:
    """Prints the cost of a model's collectives."""
    console.print(
        f"{figures.processes} processes over {figures.backend}, "
        f"{figures.parameters:,} parameters in {figures.buckets} buckets"
    )
    headings = ("seconds", "median", "lower", "upper", "MB", "GB/s")
    rows = {
        cost.collective: (
            *_three(cost.seconds, "{:.3g}"),
            f"{cost.bytes / 1e6:,.1f}",
            f"{cost.gigabytes_per_second:.3g}",
        )
        for cost in figures.collectives
    }
    rows["scatter and gather"] = (*_three(figures.seconds_scattered, "{:.3g}"), "", "")
    _table(console, headings, rows)


def _three(quartiles: Quartiles, form: str) -> tuple[str, str, str]:
    return form.format(quartiles.median), form.format(quartiles.lower), form.format(quartiles.upper)


def _table(console: Console, headings: Iterable[str], rows: Mapping[str, tuple[str, ...]]) -> None:
    """Columns of numbers beside their names."""
    from rich.table import Table

    first, *others = headings
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
