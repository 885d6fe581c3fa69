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


def show_step(console: Console, found: StepFigures) -> None:
    """What one device makes of a recipe's steps."""
    rows = {
        "sequences/s": _three(found.sequences_per_second, "{:,.4g}"),
        "real tokens/s": _three(found.tokens_per_second, "{:,.0f}"),
        "positions/s": _three(found.positions_per_second, "{:,.0f}"),
    }
    if found.mfu and found.peak_flops:
        rows["MFU"] = _three(found.mfu, "{:.1%}")
    rows["seconds a step"] = _three(found.seconds, "{:.4g}")
    for name, phase in found.seconds_by_phase.items():
        rows[f"  {_PHASES[name]}"] = _three(phase, "{:.4g}")
    _table(console, ("", "median", "lower", "upper quartile"), rows)
    if found.peak_flops:
        peak = f"{found.peak_flops / 1e12:.0f} TFLOP/s of {found.device}"
        console.print(f"\nMFU          of {peak}: {found.mfu_convention}", markup=False)
    else:
        console.print(f"\nMFU          none: the peak of {found.device} is not known", markup=False)
    console.print(f"padding      {found.padding:.1%} of the positions")
    console.print(f"FLOPs        {found.flops_per_token:.4g} per real token")
    console.print(f"memory       {found.peak_memory_bytes / 2**30:.2f} GiB at most")
    console.print(f"warm-up      {found.seconds_warming_up:.1f} s")
    console.print(f"loss         {found.loss:.4f} at the last step")
    for line in found.substitutions:
        console.print(f"lacking      {line}", style="yellow", markup=False)


def show_input(console: Console, found: InputFigures) -> None:
    """How fast the input pipeline is."""
    plural = "s" * (found.workers > 1)
    console.print(
        f"through {found.through}, to {found.workers} worker{plural}: "
        f"{quantity(found.tokens)} tokens in {found.steps:,} steps, {found.seconds:.3g} s\n"
        f"tokens/s     {quantity(found.tokens_per_second)}\n"
        f"first batch  {found.seconds_to_first_batch:.3g} s"
    )


def show_balances(console: Console, found: Mapping[int, Balance]) -> None:
    """Largest work of a worker over the mean, by number of workers."""
    headings = ("workers", "max/mean", "worst", "least possible", "random", "micro-batches")
    rows = {
        f"{workers:,}": (
            f"{balance.imbalance_max_over_mean:.4f}",
            f"{balance.imbalance_worst:.4f}",
            f"{balance.imbalance_least:.4f}",
            f"{balance.imbalance_random:.4f}",
            f"{balance.micro_batches:.3g}",
        )
        for workers, balance in found.items()
    }
    _table(console, headings, rows)


def show_reduction(console: Console, found: ReductionFigures) -> None:
    """What the collectives of a model cost."""
    console.print(
        f"{found.processes} processes over {found.backend}, {found.parameters:,} parameters in "
        f"{found.buckets} buckets"
    )
    headings = ("seconds", "median", "lower", "upper", "MB", "GB/s")
    rows = {
        one.collective: (
            *_three(one.seconds, "{:.3g}"),
            f"{one.bytes / 1e6:,.1f}",
            f"{one.gigabytes_per_second:.3g}",
        )
        for one in found.collectives
    }
    rows["scatter and gather"] = (*_three(found.seconds_scattered, "{:.3g}"), "", "")
    _table(console, headings, rows)


def _three(found: Quartiles, form: str) -> tuple[str, str, str]:
    return form.format(found.median), form.format(found.lower), form.format(found.upper)


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
