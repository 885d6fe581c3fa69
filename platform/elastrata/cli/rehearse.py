"""`elastrata rehearse`: a recipe's own step on GPUs that are not there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, Overrides, Phase, RecipeName
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import pluralize

if TYPE_CHECKING:
    from rich.console import Console

_GIB = 2**30
_MB = 1e6
Figures = Mapping[str, Any]


def rehearse(
    recipe: RecipeName,
    overrides: Overrides = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NxDEVICE|FILE", help="Cluster: such as 1024xH100-80GB, or a YAML file."
        ),
    ] = "8xH100-80GB",
    graphs: Annotated[
        bool, typer.Option(help="Also rehearse compilation if the recipe compiles.")
    ] = True,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Run a recipe's step on simulated GPUs: memory, messages, waits, graphs.

    Runs one rank of the cluster on fake tensors, without computing anything.
    """
    from elastrata.rehearsal.process import Request
    from elastrata.rehearsal.process import rehearse as rehearse_apart

    console = open_console(as_json=json)
    request = Request(
        recipe=recipe,
        overrides=tuple(overrides or []),
        cluster=cluster,
        phase=phase,
        graphs=graphs,
    )
    console.print(f"rehearsing a step of {recipe}\n", markup=False)
    # A new process: fake CUDA devices must be loaded before torch.
    figures = rehearse_apart(request)
    show_rehearsal(console, figures)
    if json:
        print_json_line(figures)


def show_rehearsal(console: Console, figures: Figures) -> None:
    """Print a rehearsal.

    Args:
        console: the console to print to.
        figures: the figures that `elastrata rehearse --json` prints.
    """
    console.print(
        f"{figures['recipe']} on {figures['devices']}x{figures['device']}, {figures['layout']}: "
        f"{pluralize(figures['batch_size'], 'sample')} of "
        f"{pluralize(figures['seq_len'], 'token')} a step, micro-batches "
        f"of at most {pluralize(figures['micro_batch_tokens'], 'token')}, activation checkpointing "
        f"{figures['activation_checkpointing']}",
        markup=False,
    )
    for rank in figures["ranks"]:
        _show_rank(console, rank, figures["memory_bytes"])
    if figures["graphs"]:
        _show_graphs(console, figures["graphs"])


def _show_rank(console: Console, rank: Figures, memory_bytes: float) -> None:
    # A ratio far from 1 shows that the planner's formula misses or repeats operations.
    counted = rank["flops"] / rank["formula_flops"] if rank["formula_flops"] else 0.0
    console.print(
        f"\nrank {rank['rank']}: {rank['parameters'] / 1e9:.4g} billion parameters in its stages, "
        f"{pluralize(rank['micro_batches'], 'micro-batch')} of at most "
        f"{pluralize(rank['micro_batch_tokens'], 'token')}; "
        f"{rank['flops'] / 1e12:.4g} TFLOPs counted, {counted:.3f} times the formula's\n",
        markup=False,
    )
    _show_memory(console, rank, memory_bytes)
    _print_table(
        console,
        "messages of a step",
        ("axis", "ranks", "kind", "dtype", "device", "count", "MB"),
        [
            (m["axis"], m["ranks"], m["kind"], m["dtype"], m["device"], m["count"], _mb(m["bytes"]))
            for m in rank["messages"]
        ],
    )
    for title, place in (("a step", rank), ("a save", rank["saving"])):
        _print_table(
            console,
            f"copies of {title}",
            ("direction", "line", "in", "host memory", "count", "MB"),
            [_copy_cells(copy) for copy in place["copies"]],
        )
        _print_table(
            console,
            f"waits of the host for the device in {title}",
            ("reason", "line", "in", "count"),
            [(w["reason"], w["line"], w["function"], w["count"]) for w in place["waits"]],
        )
    _print_table(
        console,
        "process groups",
        ("backend", "ranks", "count"),
        [(group["backend"], group["ranks"], group["count"]) for group in rank["groups"]],
    )


def _show_memory(console: Console, rank: Figures, memory_bytes: float) -> None:
    peak, plan, build = rank["peak_bytes"], rank["planned_bytes"], rank["build"]
    plan_text = "" if plan is None else f"; the plan has {_gib(plan)} ({plan / peak - 1:+.1%})"
    console.print(
        f"memory, GiB of {_gib(memory_bytes)}: {_gib(peak)} at the peak of a "
        f"step{plan_text}; {_gib(build['peak_bytes'])} while the model is built, "
        f"{_gib(build['bytes'])} after it",
        markup=False,
    )
    kinds = ", ".join(f"{kind} {_gib(size)}" for kind, size in rank["memory"].items())
    console.print(f"  by kind: {kinds}", markup=False)
    if plan is not None:
        terms = ", ".join(f"{term} {_gib(size)}" for term, size in rank["planned"].items())
        console.print(f"  planned: {terms}", markup=False)


def _show_graphs(console: Console, graphs: Figures) -> None:
    console.print(
        f"\ntorch.compile over {pluralize(graphs['steps'], 'step')} of varying lengths: "
        f"{graphs['graphs']} graphs, {pluralize(graphs['breaks'], 'break')}, "
        f"{pluralize(graphs['recompilations'], 'recompilation')} after the "
        f"first step; {pluralize(graphs['next_group'], 'graph')} more in the next group of the "
        "same processes",
        markup=False,
    )
    for reason in graphs["reasons"]:
        console.print(f"  break: {reason}", markup=False)


def _copy_cells(copy: Figures) -> tuple[object, ...]:
    pages = "pinned" if copy["pinned"] else "pageable"
    waits = ", waits" if copy["waits"] else ""
    line, function = copy["line"], copy["function"]
    return copy["direction"], line, function, pages + waits, copy["count"], _mb(copy["bytes"])


def _print_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table with its numbers, in the last columns, aligned right; print nothing without
    rows."""
    if not rows:
        return
    cells = [tuple(map(_format_cell, row)) for row in [headings, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [heading in ("count", "MB", "ranks") for heading in headings]
    console.print(f"\n{title}")
    for row in cells:
        aligned = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        console.print(f"  {'  '.join(aligned)}".rstrip(), markup=False)


def _format_cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f}"


def _mb(size: int) -> str:
    return f"{size / _MB:,.2f}"
