"""`elastrata plan`: memory, time and money of a recipe on a cluster that nobody has rented yet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, Overrides, Phase, RecipeName, local_path, part_of
from elastrata.cli.plan_mixed import mixed_result, refuse_options, show_mixed_plan
from elastrata.cli.plan_report import (
    plan_result,
    show_automatic,
    show_plan,
    show_rehearsals,
    show_terms,
)
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.planner.cluster import Cluster
    from elastrata.planner.forecast import Forecast
    from elastrata.planner.group import AutomaticPlan
    from elastrata.planner.mixed_plan import MixedPlan
    from elastrata.planner.plan import Plan
    from elastrata.recipe.phase import PhaseKeys
    from elastrata.recipe.recipe import Recipe

ClusterOption = Annotated[
    str,
    typer.Option(metavar="NxDEVICE|FILE", help="Such as 128xA100-80GB or 8xA100+16xT4, or a file."),
]


def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: ClusterOption = "8xA100-80GB",
    best: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 5,
    price: Annotated[
        float | None, typer.Option(min=0, help="Of a device for an hour. Default: the file's.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Every term of the best layout.")
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            callback=local_path, help="New recipe file that trains under the best layout."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(callback=local_path, help="PNG file: speed and memory of all layouts."),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run a step under each shown layout, on GPUs not there."),
    ] = False,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Compute which layout of a recipe fits a cluster and is fastest: no GPU is needed."""
    from elastrata.planner.cluster import read_kinds
    from elastrata.planner.plan import plan as make_plan
    from elastrata.recipe.file import load_recipe
    from elastrata.recipe.length import in_steps

    console = open_console(as_json=json)
    loaded = in_steps(load_recipe(recipe, overrides or []))
    kinds = read_kinds(cluster)
    where = kinds[0]
    if price is not None:
        where = replace(where, price=price)
    if write is not None and write.exists():
        raise UserError(f"--write: {write}: there is such a file; expected a new one")
    if len(kinds) > 1:
        refuse_options(price=price is not None, plot=plot is not None, rehearse=rehearse)
        told = _plan_mixed(console, recipe, loaded, part_of(loaded, phase), kinds, best, explain)
        if write is not None:
            _write(write, recipe, overrides or [], *_mixed_variant(loaded, told))
            console.print(f"\nrecipe {write}", markup=False)
        if json:
            written = None if write is None else str(write)
            result = mixed_result(told, told.families[:best])
            print_json_line({"recipe": recipe, **result, "automatic": None, "written": written})
        return
    made = make_plan(loaded, part_of(loaded, phase), where)
    families = made.result.families[:best]
    _show_heading(console, recipe, f"{where.devices}x{where.device.name}", made)
    show_plan(console, made, families)
    if explain:
        show_terms(console, made, families[0])
    chosen = _runnable(loaded, made)
    if chosen is not None and chosen is not families[0]:
        console.print(f"\nthe fastest that this version trains: {chosen.layout}", markup=False)
    left_open = _left_open(loaded, part_of(loaded, phase), made)
    if left_open is not None:
        show_automatic(console, made, left_open)
    rehearsals: list[Mapping[str, Any] | None] = [None] * len(families)
    if rehearse:
        rehearsals = [
            _rehearsed(recipe, overrides or [], loaded, made, forecast, cluster, phase)
            for forecast in families
        ]
        show_rehearsals(console, families, rehearsals)
    if write is not None:
        _write(write, recipe, overrides or [], *_variant(loaded, made, chosen))
        console.print(f"\nrecipe {write}", markup=False)
    if plot is not None:
        _draw(made, plot)
        console.print(f"\nplot {plot}", markup=False)
    if json:
        written = None if write is None else str(write)
        print_json_line(
            {
                "recipe": recipe,
                **plan_result(made, families, rehearsals),
                "automatic": left_open and asdict(left_open),
                "written": written,
            }
        )


def _show_heading(console: Console, recipe: str, devices: str, made: Plan | MixedPlan) -> None:
    console.print(
        f"{recipe} on {devices}: {made.model.parameters / 1e9:.4g} "
        f"billion parameters, {made.batch_size:,} samples of {made.model.seq_len:,} tokens a "
        f"step, {made.steps:,} steps\n",
        markup=False,
    )


def _plan_mixed(
    console: Console,
    name: str,
    recipe: Recipe,
    part: PhaseKeys,
    kinds: tuple[Cluster, ...],
    best: int,
    explain: bool,
) -> MixedPlan:
    """Plans for several kinds of devices, and shows it."""
    from elastrata.planner.mixed_plan import mixed_plan, runnable

    made = mixed_plan(recipe, part, kinds)
    _show_heading(console, name, made.name, made)
    show_mixed_plan(console, made, made.families[:best], explain=explain)
    chosen = runnable(recipe, made)
    if chosen is not None and chosen is not made.families[0]:
        console.print(f"\nthe fastest that this version trains: {chosen.layout}", markup=False)
    return made


def _left_open(recipe: Recipe, part: PhaseKeys, made: Plan) -> AutomaticPlan | None:
    """The values that `auto` would stand for with all devices, divided as the recipe says; None
    where it leaves nothing open, or those devices cannot be divided so."""
    from elastrata.planner.group import planned

    size = recipe.parallel.group_size
    if not recipe.is_automatic or made.cluster.devices % size:
        return None
    return planned(recipe, part, made.model, made.cluster)


def _runnable(recipe: Recipe, made: Plan) -> Forecast | None:
    """The fastest layout that recipes of this version can say."""
    from elastrata.planner.plan import problems_of

    return next(
        (
            forecast
            for forecast in made.result.families
            if not problems_of(recipe, forecast.layout, made.model.seq_len)
        ),
        None,
    )


def _rehearsed(
    recipe: str,
    overrides: list[str],
    loaded: Recipe,
    made: Plan,
    forecast: Forecast,
    cluster: str,
    phase: int,
) -> Mapping[str, Any] | None:
    """The figures of a rehearsal; None where recipes of this version cannot say the layout."""
    from elastrata.planner.plan import problems_of, recipe_keys
    from elastrata.rehearsal.process import Request
    from elastrata.rehearsal.process import rehearse as rehearse_apart

    layout, seq_len = forecast.layout, made.model.seq_len
    if problems_of(loaded, layout, seq_len):
        return None
    keys = recipe_keys(loaded, layout, seq_len)
    said = [f"{path}={dumps(value)}" for path, value in keys.items()]
    request = Request(
        recipe=recipe,
        overrides=(*overrides, *said),
        cluster=cluster,
        phase=phase,
        graphs=False,
    )
    return rehearse_apart(request)


def _variant(
    recipe: Recipe, made: Plan, chosen: Forecast | None
) -> tuple[dict[str, object] | None, str]:
    """The keys of a variant under a layout, and its first line; no keys where there is none."""
    from elastrata.planner.plan import recipe_keys

    if chosen is None:
        return None, ""
    where = f"{made.cluster.devices}x{made.cluster.device.name}"
    keys = recipe_keys(recipe, chosen.layout, made.model.seq_len)
    return keys, _header(chosen, where)


def _mixed_variant(recipe: Recipe, made: MixedPlan) -> tuple[dict[str, object] | None, str]:
    from elastrata.planner.mixed_plan import mixed_keys, runnable

    chosen = runnable(recipe, made)
    if chosen is None:
        return None, ""
    return mixed_keys(recipe, chosen, made.model.seq_len), _header(chosen, made.name)


def _header(chosen: Forecast, devices: str) -> str:
    return (
        f"# {chosen.layout}, by elastrata plan for {devices}: {chosen.time.total:.4g} s a step "
        "expected\n"
    )


def _write(
    path: Path, recipe: str, overrides: list[str], keys: dict[str, object] | None, header: str
) -> None:
    """A variant of the recipe that says the layout, and what the command line changed."""
    from elastrata.recipe.yaml_values import dump_yaml, parse_yaml
    from elastrata_pipelines.storage import write_whole

    if keys is None:
        raise UserError("--write: this version trains this recipe under none of the layouts")
    values: dict[str, Any] = {}
    for override in overrides:
        dotted, _, raw = override.partition("=")
        _set(values, dotted, parse_yaml(raw, dotted, count_lines=False))
    for dotted, value in keys.items():
        _set(values, dotted, value)
    base = os.path.relpath(recipe, path.parent) if Path(recipe).is_file() else recipe
    try:
        write_whole(path, (header + dump_yaml({"extends": base, **values})).encode())
    except OSError as error:
        raise UserError(f"--write: {path}: cannot be written ({error.strerror})") from None


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for name in sections:
        values = values.setdefault(name, {})
    values[key] = value


def _draw(made: Plan, plot: Path) -> None:
    from elastrata.tracking.plots import layout_cloud

    layout_cloud(
        [
            (forecast.memory.total / 2**30, forecast.tokens_per_second, forecast.layout.pipeline)
            for forecast in made.result.forecasts
        ],
        [(forecast.memory.total / 2**30, forecast.tokens_per_second, str(forecast.layout))
         for forecast in made.result.families[:3]],
        made.cluster.device.memory_bytes / 2**30,
        plot,
    )  # fmt: skip
