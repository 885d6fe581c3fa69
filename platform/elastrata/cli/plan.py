"""`elastrata plan`: memory, time and cost of a recipe on a cluster that is not rented yet."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, Overrides, Phase, RecipeName, local_path, select_phase
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.planner.choice import AutomaticPlan
    from elastrata.planner.plan import Forecast, Plan
    from elastrata.recipe.recipe import PhaseKeys, Recipe


ClusterOption = Annotated[
    str,
    typer.Option(metavar="NxDEVICE|FILE", help="Cluster: such as 128xA100-80GB, or a YAML file."),
]


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterOption = "8xA100-80GB",
    best: Annotated[int, typer.Option(min=1, help="Number of layouts to show.")] = 5,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a device per hour. Default: as in the cluster file."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every term of the best layout.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(callback=local_path, help="Write a new recipe file with the best layout."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            callback=local_path, help="Draw speed and memory of all layouts to a PNG file."
        ),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run a step of each shown layout on simulated GPUs."),
    ] = False,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Find the fastest layout of a recipe that fits a cluster. Needs no GPU."""
    from elastrata.planner.cluster import read_cluster
    from elastrata.planner.plan import plan as make_plan
    from elastrata.recipe.data_sets import resolve_steps
    from elastrata.recipe.file import load_recipe

    console = open_console(as_json=json)
    loaded = resolve_steps(load_recipe(recipe, overrides or []))
    target = read_cluster(cluster)
    if price is not None:
        target = replace(target, price=price)
    if write is not None and write.exists():
        raise UserError(f"--write: {write}: already exists; expected a new file")
    cluster_plan = make_plan(loaded, select_phase(loaded, phase), target)
    # Each is the best of the layouts that divide the model among devices alike.
    families = cluster_plan.result.families[:best]
    _show_heading(console, recipe, f"{target.devices}x{target.device.name}", cluster_plan)
    show_plan(console, cluster_plan, families)
    if loaded.workers.spares:
        from elastrata.cluster.prestarted import SPARE_BYTES

        spares = target.per_node * SPARE_BYTES / 1e9
        console.print(
            f"spares take {spares:.1f} GB of each node's memory (workers.spares)", markup=False
        )
    if explain:
        show_terms(console, cluster_plan, families[0])
    chosen = _find_runnable(loaded, cluster_plan)
    # The fastest layout in the table may need features that this version does not train.
    if chosen is not None and chosen is not families[0]:
        console.print(
            f"\nfastest layout that this version can train: {chosen.layout}", markup=False
        )
    automatic = _plan_automatic(loaded, select_phase(loaded, phase), cluster_plan)
    if automatic is not None:
        show_automatic(console, cluster_plan, automatic)
    rehearsals: list[Mapping[str, Any] | None] = [None] * len(families)
    if rehearse:
        rehearsals = [
            _rehearse_layout(
                recipe, overrides or [], loaded, cluster_plan, forecast, cluster, phase
            )
            for forecast in families
        ]
        show_rehearsals(console, families, rehearsals)
    if write is not None:
        _write_recipe(write, recipe, overrides or [], *_layout_keys(loaded, cluster_plan, chosen))
        console.print(f"\nrecipe {write}", markup=False)
    if plot is not None:
        _draw_plot(cluster_plan, plot)
        console.print(f"\nplot {plot}", markup=False)
    if json:
        written = None if write is None else str(write)
        print_json_line(
            {
                "recipe": recipe,
                **plan_result(cluster_plan, families, rehearsals),
                "automatic": automatic and asdict(automatic),
                "written": written,
            }
        )


def _show_heading(console: Console, recipe: str, devices: str, cluster_plan: Plan) -> None:
    console.print(
        f"{recipe} on {devices}: {cluster_plan.model.parameters / 1e9:.4g} "
        f"billion parameters, {pluralize(cluster_plan.batch_size, 'sample')} of "
        f"{pluralize(cluster_plan.model.seq_len, 'token')} a step, "
        f"{pluralize(cluster_plan.steps, 'step')}\n",
        markup=False,
    )


def _plan_automatic(recipe: Recipe, part: PhaseKeys, cluster_plan: Plan) -> AutomaticPlan | None:
    """Return the values that `auto` stands for on all devices, divided as the recipe says; None if
    the recipe leaves nothing open, or its layout does not divide the number of devices."""
    from elastrata.planner.choice import plan_automatic_choice

    size = recipe.parallel.group_size
    if not recipe.is_automatic or cluster_plan.cluster.devices % size:
        return None
    return plan_automatic_choice(recipe, part, cluster_plan.model, cluster_plan.cluster)


def _find_runnable(recipe: Recipe, cluster_plan: Plan) -> Forecast | None:
    """Return the fastest layout that this version can train; None without one."""
    from elastrata.planner.plan import layout_problems

    return next(
        (
            forecast
            for forecast in cluster_plan.result.families
            if not layout_problems(recipe, forecast.layout, cluster_plan.model.seq_len)
        ),
        None,
    )


def _rehearse_layout(
    recipe: str,
    overrides: list[str],
    loaded: Recipe,
    cluster_plan: Plan,
    forecast: Forecast,
    cluster: str,
    phase: int,
) -> Mapping[str, Any] | None:
    """Rehearse a layout and return the figures; None if this version cannot train it."""
    from elastrata.planner.plan import layout_problems, recipe_keys
    from elastrata.rehearsal.process import Request
    from elastrata.rehearsal.process import rehearse as rehearse_apart

    layout, seq_len = forecast.layout, cluster_plan.model.seq_len
    if layout_problems(loaded, layout, seq_len):
        return None
    keys = recipe_keys(loaded, layout, seq_len)
    layout_overrides = [f"{path}={dumps(value)}" for path, value in keys.items()]
    request = Request(
        recipe=recipe,
        overrides=(*overrides, *layout_overrides),
        cluster=cluster,
        phase=phase,
        graphs=False,
    )
    # A new process: fake CUDA devices must be loaded before torch.
    return rehearse_apart(request)


def _layout_keys(
    recipe: Recipe, cluster_plan: Plan, chosen: Forecast | None
) -> tuple[dict[str, object] | None, str]:
    """Return the recipe keys of a layout and the header of its file; no keys without a layout."""
    from elastrata.planner.plan import recipe_keys

    if chosen is None:
        return None, ""
    where = f"{cluster_plan.cluster.devices}x{cluster_plan.cluster.device.name}"
    keys = recipe_keys(recipe, chosen.layout, cluster_plan.model.seq_len)
    return keys, _format_header(chosen, where)


def _format_header(chosen: Forecast, devices: str) -> str:
    return (
        f"# {chosen.layout}, planned for {devices}: expected {chosen.time.total:.4g} s per step\n"
    )


def _write_recipe(
    path: Path, recipe: str, overrides: list[str], keys: dict[str, object] | None, header: str
) -> None:
    """Write a recipe that extends the original with the layout and the command line's changes."""
    from elastrata.recipe.yaml_values import dump_yaml, parse_yaml
    from elastrata_pipelines.storage import write_atomically

    if keys is None:
        raise UserError("--write: this version cannot train this recipe with any of the layouts")
    values: dict[str, Any] = {}
    for override in overrides:
        dotted, _, raw = override.partition("=")
        _set_value(values, dotted, parse_yaml(raw, dotted, count_lines=False))
    for dotted, value in keys.items():
        # The layout takes precedence over the command line's changes.
        _set_value(values, dotted, value)
    # `extends` is relative to the file that contains it.
    base_recipe = os.path.relpath(recipe, path.parent) if Path(recipe).is_file() else recipe
    try:
        write_atomically(path, (header + dump_yaml({"extends": base_recipe, **values})).encode())
    except OSError as error:
        raise UserError(f"--write: {path}: cannot be written ({error.strerror})") from None


def _set_value(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[key] = value


def _draw_plot(cluster_plan: Plan, plot: Path) -> None:
    from elastrata.tracking.plots import layout_cloud

    layout_cloud(
        [
            (forecast.memory.total / 2**30, forecast.tokens_per_second, forecast.layout.pipeline)
            for forecast in cluster_plan.result.forecasts
        ],
        [(forecast.memory.total / 2**30, forecast.tokens_per_second, str(forecast.layout))
         for forecast in cluster_plan.result.families[:3]],
        cluster_plan.cluster.device.memory_bytes / 2**30,
        plot,
    )  # fmt: skip


_GIB = 2**30
_TERMS = {
    "parameters": "parameters and optimizer states of this device",
    "gathered": "whole parameters of the blocks being computed",
    "gradients": "gradients: accumulated, reduced and in transit",
    "activations": "activations that blocks keep for the backward pass",
    "working": "the block being recomputed; logits and loss",
    "reserved": "driver, kernels, communication library",
    "fragmentation": "allowance for the allocator",
    "building": "peak while the model is built, before the first step; not in the sum",
    "matrices": "forward and backward, over all micro-batches",
    "recomputation": "recomputation of activations",
    "head": "logits and loss, if they make the last stage the slowest",
    "tensor_messages": "reductions of hidden states in every block",
    "pipeline_messages": "hidden states between stages",
    "bubble": "idle stages",
    "data_messages": "messages with parameters and gradients, unless hidden by computation",
    "update": "the optimizer",
    "loading": "data loading, unless hidden by computation",
}


def show_plan(console: Console, plan: Plan, best: Sequence[Forecast]) -> None:
    """Print the best layouts as a table, and the number of layouts that fit."""
    show_table(console, best)
    console.print(
        f"\n{len(plan.result.forecasts):,} layouts fit, {len(plan.result.families):,} ways to "
        f"divide the model; {plan.result.too_large:,} need more memory than a device has",
        markup=False,
    )


def show_table(console: Console, best: Sequence[Forecast]) -> None:
    """Print one line per layout, with the reason why it is slower than the first."""
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
    rows = [headings, *(_format_cells(best[0], forecast) for forecast in best)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers, why in rows:
        cells = [first.ljust(widths[0])]
        cells += [n.rjust(width) for n, width in zip(numbers, widths[1:-1], strict=True)]
        console.print("  ".join([*cells, why]).rstrip(), markup=False)


def _format_cells(best: Forecast, forecast: Forecast) -> tuple[str, ...]:
    return (
        str(forecast.layout),
        f"{forecast.memory.total / _GIB:.1f}",
        f"{forecast.time.total:.4g}",
        f"{forecast.tokens_per_second:,.0f}",
        f"{forecast.mfu:.1%}",
        f"{forecast.bubble:.1%}",
        f"{forecast.exposed_message_share:.1%}",
        f"{forecast.hours:,.1f}",
        "" if forecast.cost is None else f"{forecast.cost:,.0f}",
        forecast.explain_slowdown(best),
    )


def show_terms(console: Console, plan: Plan, forecast: Forecast) -> None:
    """Print every term of a layout's memory and time, and the device figures behind them."""
    device, efficiency = plan.cluster.device, plan.machine.efficiency
    for line in format_terms(forecast):
        console.print(line, markup=False)
    console.print(
        f"\n{device.name}: {device.peak_flops / 1e12:.4g} TFLOP/s {device.peak.dtype}, "
        f"{device.memory_bandwidth / 1e9:,.0f} GB/s of memory, {device.link / 1e9:g} GB/s over "
        f"{device.link_name}, {device.network / 1e9:g} GB/s to other nodes ({device.source})\n"
        f"reached: {efficiency.matmul:.0%} by large matrix products, "
        f"{efficiency.memory:.0%} of the memory, {efficiency.attention:.0%} by flash attention, "
        f"{efficiency.link:.0%} of the link, {efficiency.network:.0%} of the network",
        markup=False,
    )


def show_automatic(console: Console, plan: Plan, planned: AutomaticPlan) -> None:
    """Print the keys that the recipe leaves open, as a group on all devices would choose them."""
    fits = "" if planned.fits else ", which does not fit"
    is_open = planned.gradient_sync != "step"
    synced = f", parallel.gradient_sync {planned.gradient_sync}" if is_open else ""
    console.print(
        f"\nauto, with the recipe's layout on all devices ({planned.layout}): "
        f"micro_batch_tokens {planned.micro_batch_tokens:,}, activation_checkpointing "
        f"{planned.activation_checkpointing}{synced}: {planned.memory_bytes / _GIB:.1f} GiB of "
        f"{plan.cluster.device.memory_bytes / _GIB:.1f}{fits}; the run starts with the values "
        "that need least memory and adjusts them to measurements in its first steps",
        markup=False,
    )


def show_rehearsals(
    console: Console, best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> None:
    """Print one line per rehearsed layout."""
    console.print("\nrehearsed on simulated GPUs")
    for forecast, figures in zip(best, rehearsals, strict=True):
        words = (
            "this version cannot train with it" if figures is None else _describe_rehearsal(figures)
        )
        console.print(f"  {forecast.layout}: {words}", markup=False)


def _describe_rehearsal(figures: Mapping[str, Any]) -> str:
    fullest = max(figures["ranks"], key=lambda rank: rank["peak_bytes"])
    peak, plan = fullest["peak_bytes"], fullest["planned_bytes"]
    sent = sum(message["bytes"] for message in fullest["messages"])
    count = sum(message["count"] for message in fullest["messages"])
    return (
        f"runs; {peak / _GIB:.2f} GiB at the peak (plan: {plan / peak - 1:+.1%}), "
        f"{count:,} messages of {sent / 1e9:.3g} GB per step, "
        f"{sum(wait['count'] for wait in fullest['waits']):,} waits for the device"
    )


def plan_result(
    plan: Plan, best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any]:
    """Return the plan as JSON values.

    Args:
        plan: the plan.
        best: the layouts to include.
        rehearsals: the figures of each; None if it was not rehearsed.
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
    }


def layout_results(
    best: Sequence[Forecast], rehearsals: Sequence[Mapping[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return the layouts as JSON values."""
    return [
        {
            "layout": asdict(forecast.layout),
            "memory_bytes": forecast.memory.total,
            "step_seconds": forecast.time.total,
            "tokens_per_second": forecast.tokens_per_second,
            "mfu": forecast.mfu,
            "bubble": forecast.bubble,
            "exposed": forecast.exposed_message_share,
            "hours": forecast.hours,
            "cost": forecast.cost,
            "memory": asdict(forecast.memory),
            "time": asdict(forecast.time),
            "why_not": forecast.explain_slowdown(best[0]),
            "rehearsed": rehearsed,
        }
        for forecast, rehearsed in zip(best, rehearsals, strict=True)
    ]


def format_terms(forecast: Forecast) -> list[str]:
    """Return a line per term of a layout's memory and time."""
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
