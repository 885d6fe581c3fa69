"""`elastrata inspect`: the contents of a data set, and its balance on any number of workers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import (
    Json,
    Overrides,
    Phase,
    Workers,
    local_path,
    parse_workers,
    select_phase,
)
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, format_command, pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata.driver.model_inspection import ModelInspection
    from elastrata.recipe.recipe import Recipe
    from elastrata.sparsity.layers import SparsityPlan
    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import Excerpt, Inspection, SourceAccount
    from elastrata_pipelines.storage import Storage


Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA|RECIPE",
        help="Folder or URL of a data set, or a recipe, whose data and settings apply.",
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples per step. Default: the recipe's, or 16 per worker."),
]
Model = Annotated[
    str | None,
    typer.Option(help="Recipe whose model defines the cost of a sample. Default: BERT-base."),
]
MicroBatchTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Maximum tokens per micro-batch. Default: the recipe's, or 8192."),
]
RanksPerNode = Annotated[
    int, typer.Option(min=1, help="Workers per node, for the scheme that sorts within a node.")
]
Plot = Annotated[
    Path | None,
    typer.Option(
        callback=local_path,
        metavar="FILE.png",
        help="Draw the imbalance over the numbers of workers to a PNG file.",
    ),
]
Show = Annotated[
    int,
    typer.Option(
        min=0, help="Number of samples to print as text; for a recipe, as the model sees them."
    ),
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Read all files and verify their checksums.")
]


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
    """Show a data set's contents, padding and balance over workers, or a recipe's parameters."""
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import source_accounts
    from elastrata_pipelines.storage import Storage

    numbers = parse_workers(workers)
    _check_plot(plot, numbers)
    subject = _read_subject(data, overrides or [], recipe, batch, micro_batch_tokens, phase)
    console = open_console(as_json=json)
    storage = Storage(subject.url)
    model = _show_model(console, data, subject.model) if _is_recipe(data) else {}
    # Without its data set only the model of a recipe can be shown.
    if model and not model["prepared"]:
        line = (
            f"{storage.uri()}: no data set here yet: {format_command('elastrata', 'prepare', data)}"
        )
        console.print(line, markup=False)
        if json:
            print_json_line({"model": model})
        return
    manifest = Manifest.read(storage)
    if verify:
        _verify(console, storage)
    accounts = source_accounts(storage, manifest)
    samples_shown = _read_excerpts(storage, manifest, subject.model, show) if show else []
    show_manifest(console, storage.uri(), manifest)
    show_sources(console, accounts)
    show_lengths(console, manifest.length_histogram)
    inspections = []
    for number in numbers:
        inspections.append(_inspect(storage, manifest, subject, number, ranks_per_node))
        show_balance(console, inspections[-1])
    show_excerpts(console, samples_shown)
    if plot:
        _draw_plot(console, inspections, plot)
    if json:
        details = {
            "sources": [asdict(account) for account in accounts],
            "excerpts": [asdict(excerpt) for excerpt in samples_shown],
        }
        model_values = {"model": model} if model else {}
        print_json_line({**_json_result(inspections, manifest, verify), **details, **model_values})


def _show_model(console: Console, name: str, recipe: Recipe | None) -> dict[str, Any]:
    """Print the model of a recipe and return its inspection as JSON values."""
    from elastrata.driver.model_inspection import inspect_model

    assert recipe is not None
    inspection = inspect_model(recipe)
    show_model(console, name, recipe, inspection)
    return model_result(inspection)


def _check_plot(plot: Path | None, numbers: Sequence[int]) -> None:
    if plot and plot.suffix != ".png":
        raise UserError(f"--plot: {plot}: expected the name of a .png file")
    # The plot is a curve over numbers of workers.
    if plot and len(numbers) == 1:
        raise UserError("--plot: expected several numbers of workers, such as --workers 1,8,64")


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """Data set and settings to inspect, from the arguments and the recipe."""

    url: str
    model: Recipe | None
    """The recipe whose workload defines the cost of a sample; None: BERT-base."""
    batch_size: int | None
    tokens_per_micro_batch: int | None
    order: dict[str, int]
    """The arguments that decide the order of a recipe's samples; empty for a data set."""


def _read_subject(
    data: str,
    overrides: list[str],
    recipe: str | None,
    batch: int | None,
    micro_batch_tokens: int | None,
    phase: int,
) -> _Subject:
    from elastrata.recipe.data_sets import resolve_steps
    from elastrata.recipe.file import load_recipe

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
    run = resolve_steps(load_recipe(data, overrides))
    part = select_phase(run, phase)
    # A mixture has no single data set: its sources are mixed while they are read.
    if part.data.sources:
        places = ", ".join(part.data.places.values())
        raise UserError(f"{data}: data.sources: a mixture is inspected source by source: {places}")
    # `auto` is decided on the training machine, so inspection falls back on 8192.
    most_tokens = None if part.micro_batch_tokens == "auto" else part.micro_batch_tokens
    return _Subject(
        url=part.data.path,
        model=run,
        batch_size=batch or part.batch_size,
        tokens_per_micro_batch=micro_batch_tokens or most_tokens,
        order={"window_stripes": part.data.window_stripes, "seed": run.seed},
    )


def _is_recipe(name: str) -> bool:
    from elastrata.recipe.yaml_reader import available_recipes

    # A recipe file that does not exist is reported as such, not as a data set.
    if name.endswith((".yaml", ".yml")):
        return True
    # A folder that has the name of a recipe is a data set.
    return not Path(name).exists() and name in available_recipes()


def _inspect(
    storage: Storage, manifest: Manifest, subject: _Subject, workers: int, ranks_per_node: int
) -> Inspection:
    from elastrata_pipelines.inspection import SAMPLES_OF_A_WORKER
    from elastrata_pipelines.inspection import inspect as inspect_data

    return inspect_data(
        storage,
        workers=workers,
        # A small data set may not fill the default batch.
        batch_size=subject.batch_size or min(SAMPLES_OF_A_WORKER * workers, manifest.samples),
        # A micro-batch must hold at least one sample of full length.
        tokens_per_micro_batch=subject.tokens_per_micro_batch or max(8192, manifest.seq_len),
        work=_work_model(subject.model, manifest),
        ranks_per_node=ranks_per_node,
        **subject.order,
    )


def _work_model(model: Recipe | None, manifest: Manifest) -> WorkModel:
    from elastrata_pipelines.inspection import BERT_BASE_WORK

    if model is None:
        return BERT_BASE_WORK
    return model.workload.work(manifest.vocabulary)


def _read_excerpts(
    storage: Storage, manifest: Manifest, model: Recipe | None, count: int
) -> list[Excerpt]:
    """Return some samples as text, with the inputs that the recipe's model would see."""
    from elastrata_pipelines.inspection import make_excerpts, read_some_rows

    rows = read_some_rows(storage, manifest, count)
    if model is None:
        return make_excerpts(storage, rows)
    from elastrata.driver.model_inspection import compute_inputs

    return make_excerpts(storage, rows, compute_inputs(model, rows, manifest))


def _verify(console: Console, storage: Storage) -> None:
    from elastrata_pipelines.inspection import verify

    with console.status("reading every file"):
        problems = verify(storage)
    if problems:
        raise UserError(*problems)
    console.print("all files are present and match their checksums\n", style="green")


def _draw_plot(console: Console, inspections: Sequence[Inspection], plot: Path) -> None:
    from elastrata.tracking.plots import imbalance_curves

    curves: dict[str, dict[int, float]] = {name: {} for name in SCHEMES.values()}
    for inspection in inspections:
        for scheme in inspection.schemes:
            curves[SCHEMES[scheme.scheme]][inspection.workers] = scheme.imbalance_max_over_mean
    imbalance_curves(curves, plot)
    console.print(f"plot {plot}", markup=False)


def _json_result(
    inspections: Sequence[Inspection], manifest: Manifest, is_verified: bool
) -> dict[str, Any]:
    """Return the JSON values that the command prints."""
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
        "verified": is_verified,
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


_HISTOGRAM_LINES, _BAR_CHARACTERS = 16, 40
SCHEMES = {
    "deal": "dealt by work",
    "random": "random",
    "stratified": "stratified",
    "exchanged_in_nodes": "sorted within a node",
    "sorted_round_robin": "sorted, round-robin",
    "sorted_to_and_fro": "sorted, to and fro",
    "first_fit": "first-fit packing",
}
"""Names of the compared schemes. Training uses the first."""


def show_manifest(console: Console, where: str, manifest: Manifest) -> None:
    """Print the parts of the data set at `where`."""
    size = sum(entry.bytes for entry in manifest.files)
    rows = {
        "data": where,
        "samples": f"{manifest.samples:,} of at most {pluralize(manifest.seq_len, 'token')}",
        "tokens": f"{manifest.tokens:,} ({manifest.token_dtype})",
        "stripes": f"{manifest.stripes:,} of {pluralize(manifest.stripe_size, 'sample')}, in "
        f"{pluralize(len(manifest.shards), 'shard')}, {size / 1e6:,.1f} MB",
        "packing": manifest.packing + (", sentence pairs" if manifest.pairs else ""),
        "vocabulary": f"{manifest.vocabulary.size:,} ids, {manifest.tokenizer_fingerprint[:12]}",
        "fingerprint": manifest.fingerprint[:12],
    }
    for name, value in rows.items():
        console.print(f"{name:<12} {value}", markup=False)


def show_sources(console: Console, accounts: Sequence[SourceAccount]) -> None:
    """Print a row per source, then the skipped documents of each and the reasons."""
    if not accounts:
        return
    from rich.markup import escape
    from rich.table import Table

    from elastrata_pipelines.preparation.provenance import format_counts

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("source")
    for heading in ("weight", "documents", "held out", "samples", "tokens", "share", "unknown"):
        table.add_column(heading, justify="right", no_wrap=True)
    for account in accounts:
        unknown = account.unknown_share
        table.add_row(
            escape(account.name),
            f"{account.weight:g}",
            f"{account.documents:,}",
            f"{account.held_out:,}",
            f"{account.samples:,}",
            f"{account.tokens:,}",
            f"{account.share:.1%}",
            "-" if unknown is None else f"{unknown:.2%}",
        )
    console.print()
    console.print(table)
    for account in accounts:
        if account.skipped:
            console.print(
                f"skipped of {account.name}: {format_counts(account.skipped)}",
                style="yellow",
                markup=False,
            )


def show_excerpts(console: Console, excerpts: Sequence[Excerpt]) -> None:
    """Print samples as text, one line per document or half of a sentence pair."""
    for excerpt in excerpts:
        kind = {
            None: "",
            True: ", the second part is the next one",
            False: ", the second part is random",
        }
        console.print(
            f"\nsample {excerpt.sample_id:016x}, {pluralize(excerpt.tokens, 'token')}", end=""
        )
        console.print(kind[excerpt.is_next])
        for part in excerpt.parts:
            console.print(f"| {_escape_controls(part)}", markup=False, highlight=False)
        if excerpt.seen is not None:
            seen = _escape_controls(excerpt.seen)
            console.print(f"seen: {seen}", style="cyan", markup=False, highlight=False)


def _escape_controls(text: str) -> str:
    """Return a text as one line, with control characters escaped for the terminal."""
    # Texts of a data set may contain escape sequences.
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def show_lengths(console: Console, histogram: tuple[int, ...]) -> None:
    """Print a bar per band of lengths; `histogram[s]` is the number of samples with s tokens."""
    from rich.bar import Bar
    from rich.table import Table

    # Rounded up, so that at most `_HISTOGRAM_LINES` bands cover all lengths.
    width = -(-(len(histogram) - 1) // _HISTOGRAM_LINES)
    bands = [
        (first, min(first + width, len(histogram)) - 1) for first in range(1, len(histogram), width)
    ]
    counts = [sum(histogram[first : last + 1]) for first, last in bands]
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column(justify="right")
    for (first, last), count in zip(bands, counts, strict=True):
        bar = Bar(size=max(counts), begin=0, end=count, width=_BAR_CHARACTERS, color="cyan")
        table.add_row(f"{first}-{last}" if last > first else str(first), f"{count:,}", bar)
    console.print("\ntokens in a sample")
    console.print(table)


def show_balance(console: Console, inspection: Inspection) -> None:
    """Print how equal the work of the workers is under each scheme, and the advice."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("max/mean", "worst", "micro-batches", "padding to longest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for scheme in inspection.schemes:
        table.add_row(
            SCHEMES[scheme.scheme],
            f"{scheme.imbalance_max_over_mean:.4f}",
            f"{scheme.imbalance_worst:.4f}",
            f"{scheme.micro_batches:.3g}",
            f"{scheme.padding_fraction:.1%}",
            style="bold" if scheme.scheme == "deal" else None,
        )
    console.print(
        f"\n{pluralize(inspection.batch_size, 'sample')} a step over "
        f"{pluralize(inspection.workers, 'worker')}, "
        f"{pluralize(inspection.balance.steps, 'step')}: largest work "
        "of a worker over the mean"
    )
    console.print(table)
    if inspection.advice:
        console.print(f"advice: {inspection.advice}", style="yellow", markup=False)


def show_model(console: Console, name: str, recipe: Recipe, inspection: ModelInspection) -> None:
    """Print the parameter groups of a recipe's model."""
    tokenizer = "" if inspection.prepared else ", as configured in data.prepare"
    console.print(f"recipe       {name}", markup=False)
    console.print(f"optimizer    {recipe.optimizer.name}, lr {recipe.optimizer.lr:g}", markup=False)
    for line in _automatic_lines(recipe):
        console.print(f"auto         {line}", markup=False)
    console.print(f"vocabulary   {inspection.vocabulary:,} ids{tokenizer}\n", markup=False)
    _show_groups(console, inspection)
    for number, plan in enumerate(inspection.sparsity):
        _show_plan(console, plan, f"phase {number}" if len(inspection.sparsity) > 1 else "sparsity")
    console.print()


def _automatic_lines(recipe: Recipe) -> list[str]:
    """Return a line per key whose value is decided on the training machine."""
    lines = []
    if any(part.micro_batch_tokens == "auto" for part in recipe.parts):
        lines.append("micro_batch_tokens, assumed here to be 8192 or one sample")
    if recipe.activation_checkpointing == "auto":
        lines.append("activation_checkpointing")
    if recipe.parallel.gradient_sync == "auto":
        lines.append("parallel.gradient_sync")
    return [f"{line}: `elastrata plan` shows the value for a cluster" for line in lines]


def _show_groups(console: Console, inspection: ModelInspection) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    for heading in ("parameters", "updated by", "weight decay"):
        table.add_column(heading)
    for heading in ("tensors", "numbers"):
        table.add_column(heading, justify="right")
    for group in inspection.groups:
        decay = f"{group.weight_decay:g}" if group.weight_decay else "none"
        counts = (f"{len(group.parameters):,}", f"{group.num_parameters:,}")
        table.add_row(group.name, group.rule, decay, *counts)
    tensors = sum(len(group.parameters) for group in inspection.groups)
    table.add_row("all", "", "", f"{tensors:,}", f"{_num_parameters(inspection):,}")
    console.print(table)
    for group in inspection.groups:
        console.print(f"\n{group.name}", markup=False)
        for pattern, count in group.patterns().items():
            console.print(f"  {pattern}{f' x {count}' if count > 1 else ''}", markup=False)


def _show_plan(console: Console, plan: SparsityPlan, heading: str) -> None:
    """Print the layers of a phase by their share of zeros, and the FLOPs of a sample."""
    console.print(
        f"\n{heading}: {plan.method}, {plan.level:.1%} of the sparse layers' weights at zero; "
        f"{plan.flops:.3g} of {plan.flops_dense:.3g} FLOPs for {pluralize(plan.seq_len, 'token')}, "
        f"{plan.times_fewer:.2f} times fewer",
        markup=False,
    )
    for (pattern, shape, share), count in _count_alike(plan).items():
        times = f" x {count}" if count > 1 else ""
        console.print(f"  {pattern} {list(shape)}{times}: {share:.2%} zero", markup=False)


def _count_alike(plan: SparsityPlan) -> Counter[tuple[str, tuple[int, int], float]]:
    """Count the layers that share a name pattern (`*` for numbers), a shape and a share of
    zeros."""
    return Counter(
        (re.sub(r"\.\d+(?=\.|$)", ".*", name), shape, plan.zeros[name] / (shape[0] * shape[1]))
        for name, shape in plan.shapes.items()
    )


def _num_parameters(inspection: ModelInspection) -> int:
    return sum(group.num_parameters for group in inspection.groups)


def model_result(inspection: ModelInspection) -> dict[str, Any]:
    """Return the inspection of a model as JSON values."""
    return {
        "parameters": _num_parameters(inspection),
        "vocabulary": inspection.vocabulary,
        "prepared": inspection.prepared,
        "groups": [
            {
                "name": group.name,
                "rule": group.rule,
                "weight_decay": group.weight_decay,
                "tensors": len(group.parameters),
                "parameters": group.num_parameters,
                "patterns": group.patterns(),
            }
            for group in inspection.groups
        ],
        "sparsity": [
            {
                "method": plan.method,
                "level": plan.level,
                "layers": {
                    name: plan.zeros[name] / (rows * columns)
                    for name, (rows, columns) in plan.shapes.items()
                },
                "seq_len": plan.seq_len,
                "flops_dense": plan.flops_dense,
                "flops": plan.flops,
                "times_fewer": plan.times_fewer,
            }
            for plan in inspection.sparsity
        ],
    }
