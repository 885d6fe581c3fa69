"""`elastrata generate`: what a trained model makes of a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastrata.cli.options import Json
from elastrata.terminal.console import open_console, print_json_line
from elastrata_pipelines.errors import UserError


def generate(
    model: Annotated[
        str, typer.Argument(metavar="RUN|EXPORT", help="Folder or URL of a run; or a folder.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Text file to tell the model's perplexity of.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add to the prompt.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0, help="Below 1: likelier tokens; 0: always the likeliest.")
    ] = 1.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Choose among so many of the likeliest tokens.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: newest, best (smallest evaluation loss), or a step.")
    ] = "newest",
    json: Json = False,
) -> None:
    """Continue a text with a run's or an exported model, or tell its perplexity of a file."""
    if prompt is None and file is None:
        raise UserError("expected --prompt TEXT to continue, or --file PATH for the perplexity")
    text = _read(file)
    from elastrata.inference.language_model import (
        Sampling,
        continuation,
        load_language_model,
        perplexity,
    )
    from elastrata.run.claim import place_of_model

    console = open_console(as_json=json)
    loaded = load_language_model(place_of_model(model), checkpoint=checkpoint)
    continued = measured = None
    if prompt is not None:
        sampling = Sampling(temperature=temperature, top_k=top_k, seed=seed)
        continued = continuation(loaded, prompt, tokens=tokens, sampling=sampling)
        console.print(prompt + continued.text, markup=False)
    if text is not None:
        measured = perplexity(loaded, text)
        console.print(
            f"perplexity {measured.perplexity:.2f}, loss {measured.loss:.4f} over "
            f"{measured.tokens:,} tokens of {file}",
            markup=False,
        )
    if json:
        print_json_line(
            {
                "model": model,
                "prompt": prompt,
                "continuation": asdict(continued) if continued else None,
                "perplexity": asdict(measured) if measured else None,
            }
        )


def _read(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--file: {file}: cannot be read ({reason})") from None
