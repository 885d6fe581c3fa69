"""The report on a data set, as `elastrata inspect` shows it to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata_pipelines.excerpts import Excerpt
    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.inspection import Inspection
    from elastrata_pipelines.source_accounts import SourceAccount

_HISTOGRAM_LINES, _BAR_CHARACTERS = 16, 40
SCHEMES = {
    "deal": "dealt by work",
    "random": "random",
    "stratified": "stratified",
    "exchanged_in_nodes": "sorted in a node",
    "sorted_round_robin": "sorted, in turn",
    "sorted_to_and_fro": "sorted, to and fro",
    "first_fit": "first-fit packing",
}
"""What people are told of the schemes of a comparison. Training does the first."""


def show_manifest(console: Console, where: str, manifest: Manifest) -> None:
    """What the data set at `where` consists of."""
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


def show_sources(console: Console, accounts: Sequence[SourceAccount]) -> None:
    """What each source gave, and below what was skipped of it and why."""
    if not accounts:
        return
    from rich.markup import escape
    from rich.table import Table

    from elastrata_pipelines.preparation.skipped import in_words

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
                f"skipped of {account.name}: {in_words(account.skipped)}",
                style="yellow",
                markup=False,
            )


def show_excerpts(console: Console, excerpts: Sequence[Excerpt]) -> None:
    """Samples as text, a line for each document, or half of a pair, in them."""
    for excerpt in excerpts:
        kind = {None: "", True: ", the second part follows", False: ", the second part is random"}
        console.print(f"\nsample {excerpt.sample_id:016x}, {excerpt.tokens} tokens", end="")
        console.print(kind[excerpt.is_next])
        for part in excerpt.parts:
            console.print(f"| {_printable(part)}", markup=False, highlight=False)
        if excerpt.seen is not None:
            seen = _printable(excerpt.seen)
            console.print(f"seen: {seen}", style="cyan", markup=False, highlight=False)


def _printable(text: str) -> str:
    """A text in one line, without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def show_lengths(console: Console, histogram: tuple[int, ...]) -> None:
    """A bar for every band of lengths; `histogram[s]` samples have s tokens."""
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


def show_balance(console: Console, found: Inspection) -> None:
    """How equal the work of the workers is, scheme by scheme, and the advice."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), header_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("max/mean", "worst", "micro-batches", "padding if padded"):
        table.add_column(heading, justify="right", no_wrap=True)
    for scheme in found.schemes:
        table.add_row(
            SCHEMES[scheme.scheme],
            f"{scheme.imbalance_max_over_mean:.4f}",
            f"{scheme.imbalance_worst:.4f}",
            f"{scheme.micro_batches:.3g}",
            f"{scheme.padding_fraction:.1%}",
            style="bold" if scheme.scheme == "deal" else None,
        )
    console.print(
        f"\n{found.batch_size:,} samples a step over {found.workers:,} "
        f"worker{'s' * (found.workers > 1)}, {found.balance.steps} steps: largest work of a worker "
        "over the mean"
    )
    console.print(table)
    if found.advice:
        console.print(f"advice: {found.advice}", style="yellow", markup=False)
