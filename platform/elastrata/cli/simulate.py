"""`elastrata simulate`: the effect on a run of machines that come and go, before it starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, Overrides, RecipeName, local_path
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.planner.cluster import Cluster
    from elastrata.recipe.recipe import Recipe
    from elastrata.simulation.simulate import (
        Conditions,
        IntervalSweep,
        Prices,
        RecoverySeconds,
        Simulation,
    )
    from elastrata.simulation.trace import Event
from elastrata_pipelines.errors import pluralize

_DAY = 86_400.0


def simulate(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NxDEVICE|FILE",
            help="Cluster: such as 64xA100-80GB, or a YAML file. One worker per device.",
        ),
    ] = "8xA100-80GB",
    step_seconds: Annotated[
        float | None,
        typer.Option(
            min=1e-6,
            help="Seconds per step on the whole cluster. Default: as in `elastrata plan`.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="CSV file with seconds,event,workers. Default: random events."
        ),
    ] = None,
    lost_per_hour: Annotated[
        float, typer.Option(min=0, help="Losses of each worker per hour.")
    ] = 0.01,
    with_notice: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the losses that are announced beforehand.")
    ] = 0.0,
    hours_away: Annotated[
        float, typer.Option(min=0, help="Mean hours until a lost worker is replaced.")
    ] = 1.0,
    driver_lost_per_hour: Annotated[
        float, typer.Option(min=0, help="Losses of the driver per hour.")
    ] = 0.0,
    days: Annotated[float, typer.Option(min=0, help="Maximum simulated days.")] = 365.0,
    recovery: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Recovery times, as written by benchmarks/faults.py."),
    ] = None,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Search for the best interval between checkpoints.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=local_path, help="Draw the number of workers over time to a PNG file."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random events.")] = 0,
    json: Json = False,
) -> None:
    """Simulate a run on workers that are lost and replaced: goodput, cost, checkpoint intervals."""
    from elastrata.planner.cluster import read_cluster
    from elastrata.recipe.data_sets import resolve_steps
    from elastrata.recipe.file import load_recipe
    from elastrata.simulation import simulate as simulation
    from elastrata.simulation.simulate import RecoverySeconds, read_recovery
    from elastrata.simulation.trace import Rates, read_trace, sample_events

    console = open_console(as_json=json)
    loaded = resolve_steps(load_recipe(recipe, overrides or []))
    cluster_spec = read_cluster(cluster)
    seconds_by_fault = read_recovery(recovery) if recovery else RecoverySeconds()
    trace_events = read_trace(trace) if trace else None
    run_conditions = _conditions(loaded, cluster_spec, step_seconds, seconds_by_fault)
    rates = Rates(
        lost_per_hour=lost_per_hour,
        with_notice=with_notice,
        hours_away=hours_away,
        driver_lost_per_hour=driver_lost_per_hour,
    )

    # A function, as every simulated interval replays the same events from the start.
    def events() -> Iterable[Event]:
        return trace_events or sample_events(
            run_conditions.workers_max, rates, seconds=days * _DAY, seed=seed
        )

    result = simulation.simulate(
        run_conditions, events, seconds=days * _DAY, prices=_prices(cluster_spec)
    )
    interval_sweep = (
        simulation.sweep(run_conditions, events, seconds=days * _DAY) if intervals else None
    )
    show_simulation(console, result, run_conditions.steps)
    if interval_sweep is not None:
        show_sweep(console, interval_sweep)
    elif intervals:
        console.print("\nno fault needs a durable checkpoint, so any interval is equally good")
    if plot is not None:
        from elastrata.tracking.plots import workers_over_time

        workers_over_time(result.outcome.sizes, result.outcome.seconds, plot)
        console.print(f"\nplot {plot}", markup=False)
    if json:
        print_json_line({"recipe": recipe, **simulation_result(result, interval_sweep)})


def _conditions(
    recipe: Recipe, cluster: Cluster, seconds: float | None, seconds_by_fault: RecoverySeconds
) -> Conditions:
    """Return the conditions of a run that has one worker per device."""
    from elastrata.recipe.data_sets import assume_full_samples, data_spec
    from elastrata.simulation.simulate import Pace, conditions, plan_pace, step_seconds
    from elastrata.workload.workload import model_spec

    spec = data_spec(recipe)
    # The data may not be prepared yet: phases in tokens are counted in full-length samples.
    recipe = assume_full_samples(recipe, spec.seq_len)
    if seconds is None:
        pace, group = plan_pace(recipe, cluster)
    else:
        pace = Pace(worker_seconds=seconds * cluster.devices, fixed_seconds=0.0)
        group = recipe.parallel.group_size
    return conditions(
        recipe,
        step_seconds(recipe, pace, group=group),
        seconds_by_fault,
        parameters=model_spec(recipe.workload, spec.vocabulary, spec.seq_len).parameters,
        workers=cluster.devices,
        group=group,
    )


def _prices(cluster: Cluster) -> Prices | None:
    from elastrata.simulation.simulate import Prices

    # The cost on spot machines is compared with that on demand, so both prices are needed.
    if cluster.price is None or cluster.spot_price is None:
        return None
    return Prices(on_demand=cluster.price, spot=cluster.spot_price)


_FAULTS = {"drain": "drain", "driver": "lost driver", "kill": "killed process", "lose": "loss"}
"""Nouns of the kinds of faults."""


def show_simulation(console: Console, simulation: Simulation, steps: int) -> None:
    """Print how the simulated run spends its time, and its cost."""
    outcome = simulation.outcome
    faults = ", ".join(pluralize(n, _FAULTS[kind]) for kind, n in sorted(outcome.faults.items()))
    rows = {
        "steps": f"{outcome.steps:,} of {steps:,}, in {_format_duration(outcome.seconds)}",
        "undisturbed": _format_duration(simulation.undisturbed_seconds),
        "goodput": f"{outcome.goodput:.2%} of the time in productive steps",
        "  repeated": f"{_format_share(outcome.seconds_again, outcome.seconds)}: "
        + pluralize(outcome.lost_steps, "step"),
        "  recovering": _format_share(outcome.seconds_recovering, outcome.seconds),
        "  saving": _format_share(outcome.seconds_saving, outcome.seconds),
        "  waiting": f"{_format_share(outcome.seconds_waiting, outcome.seconds)}: too few workers",
        "faults": faults or "none",
        "resizes": f"{outcome.resizes:,}",
        "workers": f"{outcome.worker_seconds / max(1e-9, outcome.seconds):,.1f} on average",
    }
    if simulation.cost is not None and simulation.cost_on_demand:
        rows["cost"] = (
            f"{simulation.cost:,.2f}, {simulation.cost / simulation.cost_on_demand:.1%} of "
            f"{simulation.cost_on_demand:,.2f} on demand without faults"
        )
    for name, value in rows.items():
        console.print(f"{name:<13}{value}", markup=False)


def show_sweep(console: Console, sweep: IntervalSweep) -> None:
    """Print the goodput by interval, and the intervals of the formulas by Young and Daly."""
    console.print(
        f"\nsteps between durable checkpoints, if a fault needs one every "
        f"{_format_duration(sweep.seconds_between_faults)}: best {sweep.best:,}, "
        f"Young {sweep.young:,}, Daly {sweep.daly:,}",
        markup=False,
    )
    for interval, goodput in sweep.goodput.items():
        console.print(f"  {interval:>9,}  {goodput:.3%}")


def simulation_result(simulation: Simulation, sweep: IntervalSweep | None) -> dict[str, Any]:
    """Return the simulation as JSON values."""
    outcome = asdict(simulation.outcome)
    # One entry per resize, which --plot shows; too many for the JSON line.
    outcome.pop("sizes")
    return {
        **outcome,
        "goodput": simulation.outcome.goodput,
        "undisturbed_seconds": simulation.undisturbed_seconds,
        "cost": simulation.cost,
        "cost_on_demand": simulation.cost_on_demand,
        "intervals": None if sweep is None else asdict(sweep),
    }


def _format_duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _format_share(part: float, whole: float) -> str:
    return f"{part / whole if whole else 0.0:.2%}"
