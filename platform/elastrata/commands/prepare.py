"""`elastrata prepare`: text to shards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.commands.options import Address, Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.preparation import PrepareConfig


def prepare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="A recipe with data.prepare, and changes to it. With --text: more paths.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders or globs of text, JSON Lines or Parquet; local or URLs."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder or URL of the data set. Default: the recipe's.")
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="With --text: wordpiece or bpe to train one, a folder or a hub name."),
    ] = "wordpiece",
    vocab_size: Annotated[
        int, typer.Option(help="With --text: ids of the trained tokenizer.")
    ] = 8192,
    seq_len: Annotated[int, typer.Option(help="With --text: most tokens in a sample.")] = 128,
    packing: Annotated[str, typer.Option(help="With --text: none, concat or best_fit.")] = "none",
    held_out: Annotated[
        float, typer.Option(help="With --text: share of the documents kept for evaluation.")
    ] = 0.01,
    overwrite: Annotated[bool, typer.Option(help="Replace the data set that is there.")] = False,
    address: Address = None,
    json: Json = False,
) -> None:
    """Turn text into shards that training reads, from a recipe or from --text PATH... --out DIR."""
    if text:
        plans = _from_options(
            out=out,
            sources=[{"paths": [*text, *(arguments or [])]}],
            tokenizer=(
                {"train": tokenizer, "vocab_size": vocab_size}
                if tokenizer in ("wordpiece", "bpe")
                else {"load": tokenizer}
            ),
            seq_len=seq_len,
            packing=packing,
            held_out=held_out or None,
        )
    else:
        plans = _from_recipe(arguments or [], out)
    from elastrata.launch.ray_session import ray_session
    from elastrata.terminal.stage_progress import StageProgress
    from elastrata_pipelines.preparation import prepare as prepare_data

    console = open_console(as_json=json)
    results = []
    for target, config in plans.items():
        started = time.monotonic()
        console.print(f"preparing {target}", markup=False)
        with _told_what_is_kept(console, target), StageProgress(console) as progress:
            manifest = prepare_data(
                config,
                target,
                overwrite=overwrite,
                progress=progress,
                session=lambda: ray_session(address),
            )
        results.append(_result(manifest, target, time.monotonic() - started))
        _summarize(console, results[-1])
    if json:
        print_json_line(results[0] if len(results) == 1 else {"data_sets": results})


@contextmanager
def _told_what_is_kept(console: Console, target: str) -> Iterator[None]:
    """Says of an interrupted preparation what the next one need not do again."""
    from elastrata_pipelines.preparation.kept_tokenizer import KEPT_TOKENIZER
    from elastrata_pipelines.storage import Storage

    try:
        yield
    except KeyboardInterrupt:
        if Storage(target).exists(KEPT_TOKENIZER):
            console.print(
                f"the trained tokenizer is kept in {target}: the same command goes on from there",
                markup=False,
            )
        raise


def _from_options(*, out: str | None, **values: Any) -> dict[str, PrepareConfig]:
    from pydantic import ValidationError

    from elastrata.recipe.problems import recipe_problems
    from elastrata.recipe.yaml_reader import COMMAND_LINE, RecipeText
    from elastrata_pipelines.preparation import PrepareConfig

    if out is None:
        raise UserError("--out: missing: expected the folder or URL of the data set to write")
    try:
        return {out: PrepareConfig.model_validate(values)}
    except ValidationError as error:
        text = RecipeText(file=COMMAND_LINE, name="", values=values)
        raise UserError(*recipe_problems(error, PrepareConfig, text)) from None


def _from_recipe(arguments: list[str], out: str | None) -> dict[str, PrepareConfig]:
    from elastrata.recipe.file import load_recipe
    from elastrata.recipe.preparations import preparations

    if not arguments:
        raise UserError("expected a recipe, or --text PATH... --out DIR")
    recipe = load_recipe(arguments[0], arguments[1:])
    try:
        plans = preparations(recipe)
    except UserError as error:
        raise UserError(*(f"{arguments[0]}: {line}" for line in error.problems)) from None
    if out and len(plans) > 1:
        raise UserError(f"--out: {out}: unexpected: the recipe has {len(plans)} data sets")
    if out:
        (config,) = plans.values()
        return {out: config}
    return plans


def _result(manifest: Manifest, target: str, seconds: float) -> dict[str, Any]:
    """The JSON of the command."""
    from elastrata_pipelines.source_accounts import source_accounts
    from elastrata_pipelines.storage import Storage

    is_local = "://" not in target
    return {
        "path": str(Path(target).resolve()) if is_local else target,
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "stripes": manifest.stripes,
        "shards": len(manifest.shards),
        "vocabulary": manifest.vocabulary.size,
        "fingerprint": manifest.fingerprint,
        "seconds": round(seconds, 3),
        "sources": [asdict(account) for account in source_accounts(Storage(target), manifest)],
    }


def _summarize(console: Console, result: dict[str, Any]) -> None:
    from elastrata_pipelines.preparation.skipped import in_words

    console.print(
        f"done in {result['seconds']:.1f} s: {result['samples']:,} samples, "
        f"{result['tokens']:,} tokens, {result['stripes']:,} stripes in "
        f"{result['shards']:,} shards",
        markup=False,
    )
    for source in result["sources"]:
        if source["skipped"]:
            console.print(
                f"  skipped  of {source['name']}: {in_words(source['skipped'])}",
                style="yellow",
                markup=False,
            )
    console.print(
        f"  data     {result['path']}\n  next     elastrata inspect {result['path']}",
        markup=False,
    )
