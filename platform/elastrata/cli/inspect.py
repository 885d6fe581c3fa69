"""`elastrata inspect`: what a data set holds, and what any number of workers would see of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.inspect_report import (
    SCHEMES,
    model_result,
    show_balance,
    show_excerpts,
    show_lengths,
    show_manifest,
    show_model,
    show_sources,
)
from elastrata.cli.options import (
    Json,
    Overrides,
    Phase,
    Workers,
    local_path,
    numbers_of_workers,
    part_of,
)
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.recipe.recipe import Recipe
    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.excerpts import Excerpt
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import Inspection
    from elastrata_pipelines.storage import Storage


Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA|RECIPE",
        help="Folder or URL of a data set; or a recipe: its data, order, batch and model count.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1, help="Samples per step. Default: the recipe's, or 16 a worker where there are any."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Cost of a sample by this recipe's model. Default: that of BERT-base."),
]
MicroBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Most tokens in a micro-batch. Default: the recipe's, or 8192."),
]
RanksPerNode = Annotated[
    int, typer.Option(min=1, help="Workers of a node, for the scheme that sorts inside a node.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        callback=local_path,
        metavar="FILE.png",
        help="Draw max/mean over several numbers of workers.",
    ),
]
Show = Annotated[
    int,
    typer.Option(
        min=0, help="Print so many samples as text; with a recipe, as its model sees them."
    ),
]
Verify = Annotated[bool, typer.Option("--verify", help="Read everything, check every checksum.")]


def inspect(
    data: Data,
    overrides: Overrides = None,
    workers: Workers = "8",
    batch: Batch = None,
    recipe: Model = None,
    micro_batch_tokens: MicroBatchTokens = None,
    ranks_per_node: RanksPerNode = 8,
    phase: Phase = 0,
    plot: Plot = None,
    show: Show = 0,
    verify: Verify = False,
    json: Json = False,
) -> None:
    """Show a data set, and the padding and imbalance that any number of workers would see. Of a
    recipe, show its model's parameters too, by optimizer and weight decay."""
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.source_accounts import source_accounts
    from elastrata_pipelines.storage import Storage

    numbers = numbers_of_workers(workers)
    _check_plot(plot, numbers)
    subject = _subject(data, overrides or [], recipe, batch, micro_batch_tokens, phase)
    console = open_console(as_json=json)
    storage = Storage(subject.url)
    model = _show_model(console, data, subject.model) if _is_recipe(data) else {}
    if model and not model["prepared"]:
        console.print(f"{storage.uri()}: no data set here yet: elastrata prepare {data}")
        if json:
            print_json_line({"model": model})
        return
    manifest = Manifest.read(storage)
    if verify:
        _verify(console, storage)
    accounts = source_accounts(storage, manifest)
    shown = _excerpts(storage, manifest, subject.model, show) if show else []
    show_manifest(console, storage.uri(), manifest)
    show_sources(console, accounts)
    show_lengths(console, manifest.length_histogram)
    inspections = []
    for number in numbers:
        inspections.append(_inspect(storage, manifest, subject, number, ranks_per_node))
        show_balance(console, inspections[-1])
    show_excerpts(console, shown)
    if plot:
        _draw(console, inspections, plot)
    if json:
        told = {
            "sources": [asdict(account) for account in accounts],
            "excerpts": [asdict(excerpt) for excerpt in shown],
        }
        whole = {"model": model} if model else {}
        print_json_line({**_result(inspections, manifest, verify), **told, **whole})


def _show_model(console: Console, name: str, recipe: Recipe | None) -> dict[str, Any]:
    """Prints what there is to say of a recipe's model, and returns it as JSON values."""
    from elastrata.launch.model_inspection import inspect_model

    assert recipe is not None
    inspection = inspect_model(recipe)
    show_model(console, name, recipe, inspection)
    return model_result(inspection)


def _check_plot(plot: Path | None, numbers: Sequence[int]) -> None:
    if plot and plot.suffix != ".png":
        raise UserError(f"--plot: {plot}: expected the name of a .png file")
    if plot and len(numbers) == 1:
        raise UserError("--plot: expected several numbers of workers, such as --workers 1,8,64")


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """The data set and how to look at it, as the arguments and the recipe have it."""

    url: str
    model: Recipe | None
    """Its workload gives the cost of a sample; None: BERT-base."""
    batch_size: int | None
    tokens_per_micro_batch: int | None
    order: dict[str, int]
    """The arguments that decide the order of a recipe's samples."""


def _subject(
    data: str,
    overrides: list[str],
    recipe: str | None,
    batch: int | None,
    micro_batch_tokens: int | None,
    phase: int,
) -> _Subject:
    from elastrata.recipe.file import load_recipe
    from elastrata.recipe.length import in_steps

    if not _is_recipe(data):
        if overrides:
            raise UserError(f"{overrides[0]}: unexpected: {data} is a data set, not a recipe")
        return _Subject(
            url=data,
            model=load_recipe(recipe) if recipe else None,
            batch_size=batch,
            tokens_per_micro_batch=micro_batch_tokens,
            order={},
        )
    if recipe:
        raise UserError(f"--recipe: {recipe}: unexpected: {data} is a recipe itself")
    run = in_steps(load_recipe(data, overrides))
    part = part_of(run, phase)
    if part.data.sources:
        places = ", ".join(part.data.places.values())
        raise UserError(f"{data}: data.sources: mixed as they are read; inspect one of {places}")
    most = None if part.micro_batch_tokens == "auto" else part.micro_batch_tokens
    return _Subject(
        url=part.data.path,
        model=run,
        batch_size=batch or part.batch_size,
        tokens_per_micro_batch=micro_batch_tokens or most,
        order={"window_stripes": part.data.window_stripes, "seed": run.seed},
    )


def _is_recipe(name: str) -> bool:
    from elastrata.recipe.yaml_reader import available_recipes

    if name.endswith((".yaml", ".yml")):
        return True
    return not Path(name).exists() and name in available_recipes()


def _inspect(
    storage: Storage, manifest: Manifest, subject: _Subject, workers: int, ranks_per_node: int
) -> Inspection:
    from elastrata_pipelines.inspection import SAMPLES_OF_A_WORKER
    from elastrata_pipelines.inspection import inspect as inspect_data

    return inspect_data(
        storage,
        workers=workers,
        batch_size=subject.batch_size or min(SAMPLES_OF_A_WORKER * workers, manifest.samples),
        tokens_per_micro_batch=subject.tokens_per_micro_batch or max(8192, manifest.seq_len),
        work=_work(subject.model, manifest),
        ranks_per_node=ranks_per_node,
        **subject.order,
    )


def _work(model: Recipe | None, manifest: Manifest) -> WorkModel:
    from elastrata_pipelines.inspection import BERT_BASE_WORK

    if model is None:
        return BERT_BASE_WORK
    return model.workload.work(manifest.vocabulary)


def _excerpts(
    storage: Storage, manifest: Manifest, model: Recipe | None, count: int
) -> list[Excerpt]:
    """Some samples as text, with what the recipe's model sees of them."""
    from elastrata_pipelines.excerpts import excerpts, some_rows

    rows = some_rows(storage, manifest, count)
    if model is None:
        return excerpts(storage, rows)
    from elastrata.launch.model_inspection import inputs_of

    return excerpts(storage, rows, inputs_of(model, rows, manifest))


def _verify(console: Console, storage: Storage) -> None:
    from elastrata_pipelines.inspection import verify

    with console.status("reading every file"):
        problems = verify(storage)
    if problems:
        raise UserError(*problems)
    console.print("every file is there and has its checksum\n", style="green")


def _draw(console: Console, inspections: Sequence[Inspection], plot: Path) -> None:
    from elastrata.tracking.plots import imbalance_curves

    curves: dict[str, dict[int, float]] = {name: {} for name in SCHEMES.values()}
    for inspection in inspections:
        for scheme in inspection.schemes:
            curves[SCHEMES[scheme.scheme]][inspection.workers] = scheme.imbalance_max_over_mean
    imbalance_curves(curves, plot)
    console.print(f"plot {plot}", markup=False)


def _result(
    inspections: Sequence[Inspection], manifest: Manifest, verified: bool
) -> dict[str, Any]:
    """The JSON of the command."""
    first = inspections[0]
    return {
        "samples": first.samples,
        "tokens": first.tokens,
        "stripes": first.stripes,
        "padding_fraction": first.padding_fraction,
        "imbalance_max_over_mean": first.imbalance_max_over_mean,
        "seq_len": first.seq_len,
        "shards": len(manifest.shards),
        "vocabulary": manifest.vocabulary.size,
        "fingerprint": manifest.fingerprint,
        "padding_to_seq_len": first.padding_to_seq_len,
        "balance": asdict(first.balance),
        "advice": first.advice,
        "verified": verified,
        "comparison": [
            {
                "workers": inspection.workers,
                "batch_size": inspection.batch_size,
                "advice": inspection.advice,
                "schemes": [asdict(scheme) for scheme in inspection.schemes],
            }
            for inspection in inspections
        ],
    }
