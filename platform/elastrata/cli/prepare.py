"""`elastrata prepare`: text to shards."""

from __future__ import annotations

import json as json_text
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastrata.cli.options import Address, Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError, format_command, pluralize

if TYPE_CHECKING:
    from rich.console import Console

    from elastrata_pipelines.format import Manifest
    from elastrata_pipelines.preparation import PrepareConfig

_TRAINABLE = ("wordpiece", "bpe")
_DEFAULTS = {"seq_len": 128, "packing": "none", "held_out": 0.01}


def prepare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RECIPE] [KEY=VALUE]...",
            help="Recipe with data.prepare, and overrides. With --text: more paths.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Files, folders, globs or URLs of text, JSON Lines or Parquet."),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder or URL of the data set. Default: the recipe's.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="wordpiece or bpe: train one; else a folder or a name in the hub. Default: the "
            "recipe's, or wordpiece."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Vocabulary of the trained tokenizer. Default: the recipe's, or 8192."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Maximum tokens per sample. Default: the recipe's, or 128.")
    ] = None,
    packing: Annotated[
        str | None,
        typer.Option(help="none, concat or best_fit. Default: the recipe's, or none."),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Share of the documents to hold out for evaluation; 0: none. Default: the "
            "recipe's, or 0.01."
        ),
    ] = None,
    text_field: Annotated[
        str | None,
        typer.Option(
            help="With --text: field of JSON Lines, or column of Parquet, that contains the text. "
            "Default: text."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing data set.")] = False,
    address: Address = None,
    json: Json = False,
) -> None:
    """Turn text into a data set for training, from a recipe or from --text PATH... --out DIR."""
    given = _given(tokenizer, vocab_size, seq_len, packing, held_out)
    if text:
        plans = _from_options(_build_source([*text, *(arguments or [])], text_field), out, given)
    elif text_field is not None:
        raise UserError(
            f"--text-field: {text_field}: requires --text; recipes have text_field in "
            "data.prepare.sources"
        )
    else:
        plans = _from_recipe(arguments or [], out, given)
    results = _prepare_data_sets(plans, open_console(as_json=json), address, overwrite=overwrite)
    if json:
        print_json_line(results[0] if len(results) == 1 else {"data_sets": results})


def _prepare_data_sets(
    plans: dict[str, PrepareConfig], console: Console, address: str | None, *, overwrite: bool
) -> list[dict[str, Any]]:
    """Prepare data sets, one after the other, and return the JSON values of each."""
    from elastrata.terminal.progress import StageProgress
    from elastrata_pipelines.preparation import prepare as prepare_data

    results = []
    with _shared_session(address) as session:
        for target, config in plans.items():
            started = time.monotonic()
            console.print(f"preparing {target}", markup=False)
            with _report_kept_tokenizer(console, target), StageProgress(console) as progress:
                manifest = prepare_data(
                    config, target, overwrite=overwrite, progress=progress, session=session
                )
            results.append(_json_result(manifest, target, time.monotonic() - started))
            _summarize(console, results[-1])
    return results


@contextmanager
def _shared_session(address: str | None) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Yield a function that opens Ray for the first data set that needs it."""
    from elastrata.driver.ray_session import ray_session

    # Ray stays open for the other data sets: starting it takes seconds, and sometimes fails on a
    # busy machine.
    with ExitStack() as contexts:

        def session() -> AbstractContextManager[None]:
            contexts.enter_context(ray_session(address))
            # Its end must not close Ray, which the next data set needs.
            return nullcontext()

        yield session


@contextmanager
def _report_kept_tokenizer(console: Console, target: str) -> Iterator[None]:
    """Print which work of an interrupted preparation the next one can reuse."""
    from elastrata_pipelines.preparation.target import KEPT_TOKENIZER
    from elastrata_pipelines.storage import Storage

    try:
        yield
    except KeyboardInterrupt:
        if Storage(target).exists(KEPT_TOKENIZER):
            console.print(
                f"the trained tokenizer is in {target}; the same command will reuse it",
                markup=False,
            )
        raise


def _given(
    tokenizer: str | None,
    vocab_size: int | None,
    seq_len: int | None,
    packing: str | None,
    held_out: float | None,
) -> dict[str, Any]:
    """Return the values of the options, by dotted key of `data.prepare`."""
    values: dict[str, Any] = {}
    if tokenizer is not None:
        # Any other name is a folder or a repository of a trained tokenizer.
        values["tokenizer.train" if tokenizer in _TRAINABLE else "tokenizer.load"] = tokenizer
    for key, value in (
        ("tokenizer.vocab_size", vocab_size),
        ("seq_len", seq_len),
        ("packing", packing),
    ):
        if value is not None:
            values[key] = value
    if held_out is not None:
        # The option spells no held-out data as 0, the recipe as null.
        values["held_out"] = held_out or None
    return values


def _build_source(paths: list[str], text_field: str | None) -> dict[str, Any]:
    """Return a source of text in the form of `data.prepare.sources`."""
    return {"paths": paths, **({} if text_field is None else {"text_field": text_field})}


def _from_options(
    source: dict[str, Any], out: str | None, given: dict[str, Any]
) -> dict[str, PrepareConfig]:
    from pydantic import ValidationError

    from elastrata.recipe.problems import recipe_problems
    from elastrata.recipe.yaml_reader import COMMAND_LINE, RecipeText
    from elastrata_pipelines.preparation import PrepareConfig

    if out is None:
        raise UserError("--out: missing: expected the folder or URL of the data set to write")
    values: dict[str, Any] = {"sources": [source], "tokenizer": {}, **_DEFAULTS}
    for key, value in given.items():
        section, _, name = key.rpartition(".")
        (values[section] if section else values)[name] = value
    if not values["tokenizer"].keys() & {"train", "load"}:
        values["tokenizer"]["train"] = "wordpiece"
    try:
        return {out: PrepareConfig.model_validate(values)}
    except ValidationError as error:
        text = RecipeText(file=COMMAND_LINE, name="", values=values)
        raise UserError(*recipe_problems(error, PrepareConfig, text)) from None


def _from_recipe(
    arguments: list[str], out: str | None, given: dict[str, Any]
) -> dict[str, PrepareConfig]:
    from elastrata.recipe.data_sets import preparations
    from elastrata.recipe.file import load_recipe

    if not arguments:
        raise UserError("expected a recipe, or --text PATH... --out DIR")
    overrides = [*arguments[1:], *_overrides(given, _num_phases(arguments))]
    recipe = load_recipe(arguments[0], overrides)
    try:
        plans = preparations(recipe)
    except UserError as error:
        raise UserError(*(f"{arguments[0]}: {line}" for line in error.problems)) from None
    # One folder cannot hold several data sets.
    if out and len(plans) > 1:
        raise UserError(f"--out: {out}: unexpected: the recipe has {len(plans)} data sets")
    if out:
        (config,) = plans.values()
        return {out: config}
    return plans


def _num_phases(arguments: list[str]) -> int:
    """Return the number of phases of a recipe, which may be incomplete without the options."""
    from elastrata.recipe.recipe import Recipe
    from elastrata.recipe.yaml_reader import read_recipe_text

    # The recipe cannot be validated yet, so only its text is read.
    text = read_recipe_text(arguments[0], arguments[1:], model=Recipe)
    phases = text.values.get("phases")
    return len(phases) if isinstance(phases, list) else 0


def _overrides(given: dict[str, Any], phases: int) -> list[str]:
    """Return the options as overrides of every phase of a recipe."""
    places = [f"phases.{number}.data.prepare" for number in range(phases)] or ["data.prepare"]
    return [
        f"{place}.{key}={json_text.dumps(value)}"
        for place in places
        for key, value in given.items()
    ]


def _json_result(manifest: Manifest, target: str, seconds: float) -> dict[str, Any]:
    """Return the JSON values of a data set that the command prints."""
    from elastrata_pipelines.inspection import source_accounts
    from elastrata_pipelines.storage import Storage

    # The absolute path works from any folder.
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
    from elastrata.terminal.progress import format_amount
    from elastrata_pipelines.preparation.provenance import format_counts

    console.print(
        f"done in {result['seconds']:.1f} s: {pluralize(result['samples'], 'sample')}, "
        f"{pluralize(result['tokens'], 'token')}, {format_amount(result['stripes'], 'stripes')} in "
        f"{format_amount(result['shards'], 'shards')}",
        markup=False,
    )
    for source in result["sources"]:
        if source["skipped"]:
            console.print(
                f"  skipped  of {source['name']}: {format_counts(source['skipped'])}",
                style="yellow",
                markup=False,
            )
    console.print(
        f"  data     {result['path']}\n"
        f"  next     {format_command('elastrata', 'inspect', result['path'])}",
        markup=False,
    )
