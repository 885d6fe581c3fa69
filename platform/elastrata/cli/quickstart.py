"""`elastrata quickstart`: text to model, end to end, on text that every machine has."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elastrata.cli.options import Json, local_path
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import format_command, pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.driver.result import TrainResult
    from elastrata.recipe.recipe import Recipe


# The commands to continue with, by workload.
_NEXT = {
    "bert": "elastrata prepare --text YOUR_TEXT --out data/mine\n"
    "            elastrata train bert/tiny data.path=data/mine --name first",
    "modernbert": "elastrata prepare --text YOUR_TEXT --tokenizer bpe --seq-len 512 "
    "--out data/mine-modern\n"
    "            elastrata train modernbert/tiny data.path=data/mine-modern --name first-modern",
    "gpt": "elastrata prepare --text YOUR_TEXT --tokenizer bpe --packing best_fit "
    "--seq-len 256 --out data/mine-gpt\n"
    "            elastrata train gpt/quick data.path=data/mine-gpt --name first-gpt",
}


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides of recipe keys, such as steps=200."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(callback=local_path, help="Folder for all output.")] = Path(
        "quickstart"
    ),
    model: Annotated[
        Literal["bert", "modernbert", "gpt"],
        typer.Option(help="Model to train."),
    ] = "bert",
    json: Json = False,
) -> None:
    """Train a small BERT, ModernBERT or GPT on Python's standard library, in minutes."""
    from elastrata.driver.quickstart import (
        collect_corpus,
        last_evaluation,
        quickstart_folder,
        quickstart_recipe,
    )
    from elastrata.driver.ray_session import ray_session
    from elastrata.run.claim import check_parent
    from elastrata_pipelines.storage import Storage

    started = time.monotonic()
    console = open_console(as_json=json)
    check_parent(Storage(str(out)), key="--out")
    # With absolute paths in it, the run can be exported from any folder.
    out = out.resolve()
    corpus = collect_corpus(out / "corpus")
    console.print(
        f"1/5  corpus: {pluralize(corpus.files, 'file')}, {corpus.bytes / 1e6:.1f} MB of Python's "
        "standard library"
    )
    recipe = quickstart_recipe(out, corpus, tuple(overrides or ()), model)
    # One session for preparation and training, as starting Ray takes seconds.
    with ray_session():
        result = _prepare_and_train(console, recipe)
    run = Storage(result.run_dir)
    evaluation = last_evaluation(run)
    console.print("4/5  export: the model as a folder for transformers")
    exported = _export(result, out / quickstart_folder("model", model))
    samples = (
        _show_continuations(console, exported)
        if model == "gpt"
        else _show_filled_masks(console, exported)
    )
    _print_summary(console, recipe, result, evaluation, exported, time.monotonic() - started)
    if json:
        print_json_line(_json_result(result, evaluation, exported, samples))


def _show_filled_masks(console: Console, model: Path) -> dict[str, Any]:
    from elastrata.driver.quickstart import fill_masks

    console.print("5/5  fill: its predictions for masked words")
    guesses = fill_masks(model)
    for guess in guesses:
        console.print(f"     {guess.line:<32} {', '.join(guess.words)}", markup=False)
    return {"filled": [asdict(guess) for guess in guesses]}


def _show_continuations(console: Console, model: Path) -> dict[str, Any]:
    from elastrata.driver.quickstart import continue_lines

    console.print("5/5  write: its continuations of the start of a line")
    continuations = continue_lines(model)
    for continuation in continuations:
        console.print(
            f"     {continuation.prompt}[{_escape_newlines(continuation.text)}]", markup=False
        )
    return {"written": [asdict(continuation) for continuation in continuations]}


def _escape_newlines(text: str) -> str:
    return text.replace("\n", "\\n")


def _prepare_and_train(console: Console, recipe: Recipe) -> TrainResult:
    from elastrata.api import prepare, train
    from elastrata.recipe.data_sets import resolve_steps
    from elastrata.terminal.progress import Progress, StageProgress

    assert recipe.data.prepare is not None
    console.print("2/5  prepare: text to shards of presorted stripes")
    with StageProgress(console) as stages:
        manifest = prepare(recipe.data.prepare, recipe.data.path, progress=stages)
    console.print(
        f"     {pluralize(manifest.samples, 'sample')}, {pluralize(manifest.tokens, 'token')}, "
        f"{pluralize(manifest.stripes, 'stripe')}"
    )
    recipe = resolve_steps(recipe)
    console.print(
        f"3/5  train: {pluralize(recipe.steps_in_all, 'step')} of "
        f"{pluralize(recipe.batch_size, 'sample')}, "
        f"{pluralize(recipe.workers.max, 'worker')}"
    )

    with Progress(recipe.steps_in_all, console, indent="     ") as progress:
        return train(recipe, show=progress)


def _export(result: TrainResult, out: Path) -> Path:
    """Export the model; the model of an earlier quickstart in the same folder is replaced."""
    from elastrata.run.export import export

    # `export` refuses a folder that is not empty.
    shutil.rmtree(out, ignore_errors=True)
    return export(result.run_dir, out)


def _json_result(
    result: TrainResult, evaluation: dict[str, float], model: Path, samples: dict[str, Any]
) -> dict[str, Any]:
    return {
        **asdict(result),
        "evaluation": evaluation,
        "plots": f"{result.run_dir}/plots",
        "model": str(model),
        **samples,
    }


def _print_summary(
    console: Console,
    recipe: Recipe,
    result: TrainResult,
    evaluation: dict[str, float],
    model: Path,
    seconds: float,
) -> None:
    from elastrata.tracking.store import tracking_uri
    from elastrata_pipelines.storage import Storage

    uri = tracking_uri(recipe.tracking.uri, Storage(recipe.storage))
    losses = "  ".join(
        f"{name.removeprefix('eval/')} {value:.3f}" for name, value in evaluation.items()
    )
    console.print(
        f"\ndone in {seconds:.0f} s: {pluralize(result.steps, 'step')}, "
        f"{pluralize(result.tokens_seen, 'token')}\n"
        f"  held-out  {losses}\n"
        f"  model     {model}\n"
        f"  pictures  {result.run_dir}/plots\n"
        f"  run       {result.run_dir}  (checkpoints, history, recipe)\n"
        f"  record    {format_command('mlflow', 'ui', '--backend-store-uri', uri)}\n"
        f"  next      {_NEXT[recipe.workload.name]}",
        markup=False,
    )
