"""`elastrata bench`: how fast the parts of a recipe's training are, one at a time."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.bench_report import show_balances, show_input, show_reduction, show_step
from elastrata.cli.options import (
    Address,
    Json,
    Overrides,
    Phase,
    RecipeName,
    Workers,
    numbers_of_workers,
    part_of,
)
from elastrata.terminal.console import open_console, print_json_line

if TYPE_CHECKING:
    from elastrata.bench.input import InputFigures
    from elastrata.recipe.recipe import Recipe

_MANY_STEPS = 1_000_000

bench = typer.Typer(name="bench", help="Measure the parts of a recipe's training, one at a time.")

LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="data|full|FILE.json",
        help="Samples of the data set; random ones of full length; or random ones of lengths drawn "
        "from a histogram. Default: data, where it is prepared, else full.",
    ),
]
WarmUp = Annotated[int, typer.Option("--warm-up", min=0, help="Steps before those that count.")]


@bench.command()
def step(
    recipe: RecipeName,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 20,
    warm_up: WarmUp = 5,
    lengths: LengthsOption = None,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Measure the training step on this process's device: rates, MFU, memory, time by phase.

    Needs no Ray, and no data set but for --lengths data.
    """
    from elastrata.bench.measurement import versions
    from elastrata.bench.samples import bench_samples
    from elastrata.bench.step import measure_steps
    from elastrata.recipe.file import load_recipe

    console = open_console(as_json=json)
    chosen = _phase_alone(load_recipe(recipe, overrides or []), phase)
    samples = bench_samples(chosen, lengths, steps=warm_up + steps)
    console.print(
        f"{recipe}: {chosen.batch_size:,} samples a step, lengths: {samples.lengths}, of at most "
        f"{samples.seq_len} tokens; {_settings_line(chosen)}; {steps} steps after {warm_up}\n",
        markup=False,
    )
    figures = measure_steps(chosen, samples, warm_up=warm_up)
    show_step(console, figures)
    if json:
        sizes = {"seq_len": samples.seq_len, "vocabulary": samples.vocabulary.size}
        counts = {"steps": steps, "warm_up": warm_up, "lengths": samples.lengths}
        settings = {"recipe": recipe, **_settings(chosen), **counts, **sizes}
        print_json_line({**settings, **asdict(figures), "versions": versions()})


@bench.command()
def data(
    recipe: RecipeName,
    overrides: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Workers to read for, through Ray Data. Default: this process, without Ray."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 1000,
    warm_up: Annotated[
        int, typer.Option("--warm-up", min=1, help="Steps before those that count.")
    ] = 100,
    address: Address = None,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Measure the input pipeline: tokens per second that reach the workers, and the first batch."""
    from elastrata.bench.measurement import versions
    from elastrata.recipe.file import load_recipe

    console = open_console(as_json=json)
    chosen = _phase_alone(load_recipe(recipe, overrides or []), phase)
    figures = _read(chosen, workers, steps, warm_up, address)
    show_input(console, figures)
    if json:
        settings = {"recipe": recipe, "batch_size": chosen.batch_size, "warm_up": warm_up}
        print_json_line({**settings, **asdict(figures), "versions": versions()})


@bench.command()
def balance(
    recipe: RecipeName,
    overrides: Overrides = None,
    workers: Workers = "8,64,1024",
    samples_per_worker: Annotated[
        int, typer.Option(min=1, help="Samples in a step, for each worker.")
    ] = 16,
    lengths: LengthsOption = None,
    phase: Phase = 0,
    json: Json = False,
) -> None:
    """Measure the deal: the largest work of a worker over the mean, at any number of workers.

    `elastrata inspect` shows it beside other schemes.
    """
    from elastrata.bench.balance import measure_balances
    from elastrata.recipe.file import load_recipe

    numbers = numbers_of_workers(workers)
    console = open_console(as_json=json)
    chosen = _phase_alone(load_recipe(recipe, overrides or []), phase)
    by_workers = measure_balances(chosen, lengths, numbers, samples_per_worker=samples_per_worker)
    show_balances(console, by_workers)
    if json:
        balances = [
            {"workers": number, **asdict(measured)} for number, measured in by_workers.items()
        ]
        settings = {"recipe": recipe, "samples_per_worker": samples_per_worker}
        print_json_line({**settings, "balances": balances})


@bench.command()
def reduce(
    recipe: RecipeName,
    overrides: Overrides = None,
    processes: Annotated[
        int | None,
        typer.Option(min=2, help="Default: one per GPU where there are several, else 2."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 10,
    warm_up: WarmUp = 3,
    json: Json = False,
) -> None:
    """Measure the reduction of gradients between processes on this machine.

    Over NCCL where every process has a GPU of its own, else over gloo.
    """
    import torch

    from elastrata.bench.measurement import versions
    from elastrata.bench.reduction import bucket_sizes, measure_reduction
    from elastrata.recipe.file import load_recipe

    console = open_console(as_json=json)
    chosen = load_recipe(recipe, overrides or [])
    figures = measure_reduction(
        bucket_sizes(chosen),
        processes=processes or max(2, torch.cuda.device_count()),
        gathered=torch.bfloat16 if chosen.precision == "bf16" else torch.float32,
        rounds=steps,
        warm_up=warm_up,
    )
    show_reduction(console, figures)
    if json:
        settings = {"recipe": recipe, "steps": steps, "warm_up": warm_up}
        print_json_line({**settings, **asdict(figures), "versions": versions()})


def _phase_alone(recipe: Recipe, phase: int) -> Recipe:
    """A recipe that has no other phases, and a number of steps: what is measured is a few of them,
    however many the data would make."""
    from elastrata.recipe.phase import PhaseKeys

    part = part_of(recipe, phase)
    keys = {key: getattr(part, key) for key in PhaseKeys.model_fields}
    length = {"steps": part.steps or _MANY_STEPS, "epochs": None, "tokens": None}
    return recipe.model_copy(update={**keys, **length, "phases": ()})


def _read(
    recipe: Recipe, workers: int | None, steps: int, warm_up: int, address: str | None
) -> InputFigures:
    from elastrata.bench.input import read_here, read_through_ray
    from elastrata.trainer.preflight import training_data

    batches = training_data(recipe).train
    if workers is None:
        return read_here(batches, batch_size=recipe.batch_size, steps=steps, warm_up=warm_up)
    from elastrata.cluster.ray_session import ray_session

    with ray_session(address):
        return read_through_ray(
            batches, workers=workers, batch_size=recipe.batch_size, steps=steps, warm_up=warm_up
        )


def _settings(recipe: Recipe) -> dict[str, Any]:
    """The keys of a recipe that decide how fast its step is, beside the model."""
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
