"""`elastrata inspect`: what a data set holds, and what any number of workers would see of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.commands.options import Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata_pipelines.deal import WorkModel
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import Inspection

_HISTOGRAM_LINES, _BAR_CHARACTERS = 16, 40
_BERT_BASE_WIDTH = 768


def inspect(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Folder or URL of a data set.")],
    workers: Annotated[int, typer.Option(min=1, help="Data-parallel workers to deal to.")] = 8,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples per step. Default: 16 per worker, where there are any."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="Cost of a sample by this recipe's model. Default: that of BERT-base."),
    ] = None,
    micro_batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens in a micro-batch. Default: 8192.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and check every checksum.")
    ] = False,
    json: Json = False,
) -> None:
    """Show a data set, and the padding and imbalance that any number of workers would see."""
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import inspect as inspect_data
    from elastrata_pipelines.storage import Storage

    console = open_console(as_json=json)
    storage = Storage(data)
    manifest = Manifest.read(storage)
    if verify:
        _verify(console, storage)
    batch_size = batch or min(16 * workers, manifest.samples)
    found = inspect_data(
        storage,
        workers=workers,
        batch_size=batch_size,
        tokens_per_micro_batch=micro_batch_tokens or max(8192, manifest.seq_len),
        work=_work(recipe, manifest),
    )
    _show_manifest(console, storage.uri(), manifest)
    _show_lengths(console, manifest.length_histogram)
    _show_balance(console, found, workers, batch_size)
    if json:
        print_json_line(_result(found, manifest, verify))


def _work(recipe: str | None, manifest: Manifest) -> WorkModel:
    from elastrata_pipelines.deal import WorkModel

    if recipe is None:
        # A block of width h costs 24 h^2 FLOPs per token and 4 h per pair of tokens.
        return WorkModel(linear=6 * _BERT_BASE_WIDTH, quadratic=1)
    from elastrata.recipe.file import load_recipe

    return load_recipe(recipe).workload.work(manifest.vocabulary)


def _verify(console: Console, storage: Any) -> None:
    from elastrata_pipelines.inspection import verify

    with console.status("reading every file"):
        problems = verify(storage)
    if problems:
        raise UserError(*problems)
    console.print("every file is there and has its checksum\n", style="green")


def _show_manifest(console: Console, where: str, manifest: Manifest) -> None:
    size = sum(entry.bytes for entry in manifest.files)
    rows = {
        "data": where,
        "samples": f"{manifest.samples:,} of at most {manifest.seq_len} tokens",
        "tokens": f"{manifest.tokens:,} ({manifest.token_dtype})",
        "stripes": f"{manifest.stripes:,} of {manifest.stripe_size} samples, in "
        f"{len(manifest.shards):,} shard{'s' * (len(manifest.shards) > 1)}, {size / 1e6:,.1f} MB",
        "packing": manifest.packing + (", sentence pairs" if manifest.pairs else ""),
        "vocabulary": f"{manifest.vocabulary.size:,} ids, {manifest.tokenizer_fingerprint[:12]}",
        "fingerprint": manifest.fingerprint[:12],
    }
    for name, value in rows.items():
        console.print(f"{name:<12} {value}", markup=False)


def _show_lengths(console: Console, histogram: tuple[int, ...]) -> None:
    """A bar for every band of lengths."""
    from rich.bar import Bar
    from rich.table import Table

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


def _show_balance(console: Console, found: Inspection, workers: int, batch: int) -> None:
    from rich.table import Table

    balance = found.balance
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for heading in ("", "as dealt", "by chance"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row(
        "work of the slowest worker, over the mean",
        f"{balance.imbalance_max_over_mean:.4f}",
        f"{balance.imbalance_random:.4f}",
    )
    table.add_row(
        "padding, were micro-batches padded",
        f"{balance.padding_fraction:.1%}",
        f"{balance.padding_random:.1%}",
    )
    console.print(
        f"\n{batch:,} samples a step over {workers:,} workers, mean of {balance.steps} steps"
    )
    console.print(table)
    if found.advice:
        console.print(f"advice: {found.advice}", style="yellow", markup=False)


def _result(found: Inspection, manifest: Manifest, verified: bool) -> dict[str, Any]:
    """The JSON of the command."""
    return {
        "samples": found.samples,
        "tokens": found.tokens,
        "stripes": found.stripes,
        "padding_fraction": found.padding_fraction,
        "imbalance_max_over_mean": found.imbalance_max_over_mean,
        "seq_len": found.seq_len,
        "shards": len(manifest.shards),
        "vocabulary": manifest.vocabulary.size,
        "fingerprint": manifest.fingerprint,
        "padding_to_seq_len": found.padding_to_seq_len,
        "balance": asdict(found.balance),
        "advice": found.advice,
        "verified": verified,
    }
