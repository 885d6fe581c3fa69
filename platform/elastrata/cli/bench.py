"""`elastrata bench step`: the speed of a recipe's steps on one device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Json, Overrides, Phase, RecipeName, select_phase
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.bench.step import Quartiles, StepFigures
    from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import pluralize

# Length of a phase in epochs or tokens: more than any measurement.
_MANY_STEPS = 1_000_000

bench = typer.Typer(name="bench", help="Measure the training step of a recipe.")

LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="data|full|FILE.json",
        help="data: samples of the data set. full: random samples of full length. FILE.json: "
        "random samples with lengths from a histogram. Default: data if prepared, else full.",
    ),
]
WarmUp = Annotated[
    int, typer.Option("--warm-up", min=0, help="Steps to run before the measurement.")
]


@bench.command()
def step(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 20,
    warm_up: WarmUp = 5,
    lengths: LengthsOption = None,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Measure the training step on this process's device: rates, MFU, memory, time by phase.

    Does not need Ray. Needs a data set only with --lengths data.
    """
    from elastrata.bench.samples import bench_samples
    from elastrata.bench.step import measure_steps, versions
    from elastrata.recipe.file import load_recipe

    console = open_console(as_json=json)
    loaded = _keep_phase(load_recipe(recipe, overrides or []), phase)
    samples = bench_samples(loaded, lengths, steps=warm_up + steps)
    console.print(
        f"{recipe}: {pluralize(loaded.batch_size, 'sample')} a step, lengths: {samples.lengths}, "
        f"of at most {pluralize(samples.seq_len, 'token')}; {_settings_line(loaded)}; "
        f"{pluralize(steps, 'step')} after {warm_up} for warm-up\n",
        markup=False,
    )
    figures = measure_steps(loaded, samples, warm_up=warm_up)
    show_step(console, figures)
    if json:
        sizes = {"seq_len": samples.seq_len, "vocabulary": samples.vocabulary.size}
        counts = {"steps": steps, "warm_up": warm_up, "lengths": samples.lengths}
        settings = {"recipe": recipe, **_settings(loaded), **counts, **sizes}
        print_json_line({**settings, **asdict(figures), "versions": versions()})


def _keep_phase(recipe: Recipe, phase: int) -> Recipe:
    """Return a recipe that consists of one phase and has a number of steps."""
    from elastrata.recipe.recipe import PhaseKeys

    part = select_phase(recipe, phase)
    keys = {key: getattr(part, key) for key in PhaseKeys.model_fields}
    # Only a few steps are measured, so the length that the data would give does not matter.
    length = {"steps": part.steps or _MANY_STEPS, "epochs": None, "tokens": None}
    return recipe.model_copy(update={**keys, **length, "phases": ()})


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return the keys of a recipe that decide the speed of its step, apart from the model."""
    return {
        "precision": recipe.precision,
        "compile": recipe.compile,
        "activation_checkpointing": recipe.activation_checkpointing,
        "optimizer": recipe.optimizer.name,
        "clip": recipe.clip.method,
        "micro_batch_tokens": recipe.micro_batch_tokens,
    }


def _settings_line(recipe: Recipe) -> str:
    return ", ".join(f"{name} {value}" for name, value in _settings(recipe).items())


_PHASES = {
    "collating": "collating",
    "forward_backward": "forward and backward",
    "clip_optimizer": "clipping and optimizer",
}


def show_step(console: Console, figures: StepFigures) -> None:
    """Print the speed of a recipe's steps on one device."""
    rows = {
        "sequences/s": _format_quartiles(figures.sequences_per_second, "{:,.4g}"),
        "real tokens/s": _format_quartiles(figures.tokens_per_second, "{:,.0f}"),
        "positions/s": _format_quartiles(figures.positions_per_second, "{:,.0f}"),
    }
    if figures.mfu and figures.peak_flops:
        rows["MFU"] = _format_quartiles(figures.mfu, "{:.1%}")
    rows["seconds a step"] = _format_quartiles(figures.seconds, "{:.4g}")
    for name, phase in figures.seconds_by_phase.items():
        rows[f"  {_PHASES[name]}"] = _format_quartiles(phase, "{:.4g}")
    _print_table(console, ("", "median", "lower", "upper quartile"), rows)
    if figures.peak_flops:
        peak = f"{figures.peak_flops / 1e12:.0f} TFLOP/s of {figures.device}"
        console.print(f"\nMFU          of {peak}: {figures.mfu_convention}", markup=False)
    else:
        console.print(
            f"\nMFU          unavailable: the peak of {figures.device} is unknown", markup=False
        )
    console.print(f"padding      {figures.padding:.1%} of the positions")
    console.print(f"FLOPs        {figures.flops_per_token:.4g} per real token")
    console.print(f"memory       {figures.peak_memory_bytes / 2**30:.2f} GiB at most")
    console.print(f"warm-up      {figures.seconds_warming_up:.1f} s")
    console.print(f"loss         {figures.loss:.4f} at the last step")
    for line in figures.substitutions:
        console.print(f"warning      {line}", style="yellow", markup=False)


def _format_quartiles(quartiles: Quartiles, form: str) -> tuple[str, str, str]:
    return form.format(quartiles.median), form.format(quartiles.lower), form.format(quartiles.upper)


def _print_table(
    console: Console, headings: Iterable[str], rows: Mapping[str, tuple[str, ...]]
) -> None:
    """Print rows of numbers with their names."""
    from rich.table import Table

    first, *number_headings = headings
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column(first, no_wrap=True)
    for heading in number_headings:
        table.add_column(heading, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
