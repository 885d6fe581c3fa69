"""The report on a simulated run."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.simulation.simulate import IntervalSweep, Simulation


def show_simulation(console: Console, found: Simulation, steps: int) -> None:
    """Where the time went, and what it costs."""
    outcome = found.outcome
    faults = ", ".join(f"{count:,} {kind}" for kind, count in sorted(outcome.faults.items()))
    rows = {
        "steps": f"{outcome.steps:,} of {steps:,}, in {_duration(outcome.seconds)}",
        "undisturbed": _duration(found.undisturbed_seconds),
        "goodput": f"{outcome.goodput:.2%} of the time in steps that count",
        "  again": f"{_share(outcome.seconds_again, outcome.seconds)}: "
        f"{outcome.lost_steps:,} steps",
        "  recovering": _share(outcome.seconds_recovering, outcome.seconds),
        "  saving": _share(outcome.seconds_saving, outcome.seconds),
        "  waiting": f"{_share(outcome.seconds_waiting, outcome.seconds)}: too few workers",
        "faults": faults or "none",
        "resizes": f"{outcome.resizes:,}",
        "workers": f"{outcome.worker_seconds / max(1e-9, outcome.seconds):,.1f} there on average",
    }
    if found.cost is not None and found.cost_on_demand:
        rows["cost"] = (
            f"{found.cost:,.2f}; on demand and undisturbed {found.cost_on_demand:,.2f}: "
            f"{found.cost / found.cost_on_demand:.1%} of it"
        )
    for name, value in rows.items():
        console.print(f"{name:<13}{value}", markup=False)


def show_sweep(console: Console, found: IntervalSweep) -> None:
    """The goodput by interval, beside the formulas."""
    console.print(
        f"\nsteps between durable checkpoints, one fault that goes back to them every "
        f"{_duration(found.seconds_between_faults)}: best {found.best:,}, Young {found.young:,}, "
        f"Daly {found.daly:,}",
        markup=False,
    )
    for interval, goodput in found.goodput.items():
        console.print(f"  {interval:>9,}  {goodput:.3%}")


def simulation_result(found: Simulation, sweep: IntervalSweep | None) -> dict[str, Any]:
    """The same as JSON values."""
    outcome = asdict(found.outcome)
    outcome.pop("sizes")
    return {
        **outcome,
        "goodput": found.outcome.goodput,
        "undisturbed_seconds": found.undisturbed_seconds,
        "cost": found.cost,
        "cost_on_demand": found.cost_on_demand,
        "intervals": None if sweep is None else asdict(sweep),
    }


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"
