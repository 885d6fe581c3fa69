"""The quickstart: trains a BERT or ModernBERT that fills masked words, or a GPT that continues
lines, on the sources of Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastrata.recipe.file import load_recipe
from elastrata.recipe.recipe import Recipe
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage, name_full_disk

Model = Literal["bert", "modernbert", "gpt"]
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
# Paragraphs of code vary in length as texts do; whole files would all be truncated at
# seq_len, except for a GPT, which packs them.
_DOCUMENTS = {"bert": "paragraph", "modernbert": "paragraph", "gpt": "file"}
"""Documents per source: paragraphs or whole files."""
_BEGINNINGS = ("def __init__(self, ", "import ", "    if not isinstance(", "class ")
_NEW_TOKENS = 24
_PROMPTS = (
    "def __init__({mask}, name):",
    "import {mask}",
    "if value is not {mask}:",
    "for line {mask} lines:",
    "raise ValueError({mask})",
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The text that the quickstart trains on."""

    folder: Path
    files: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class FilledLine:
    """A line with a masked word, and the model's words for it, most likely first."""

    line: str
    words: tuple[str, ...]
    probability: float
    """Probability of the first word."""


@dataclass(frozen=True, kw_only=True)
class WrittenLine:
    """The beginning of a line, and the model's continuation."""

    prompt: str
    text: str


def collect_corpus(folder: Path) -> Corpus:
    """Copy the sources of the running Python's standard library that are UTF-8 into a folder.

    Raises:
        UserError: this Python has no library sources, or the folder cannot be written.
    """
    library = Path(sysconfig.get_path("stdlib"))
    count = size = 0
    try:
        for path, data in _sources(library):
            target = folder / path.relative_to(library)
            # Unchanged files stay as they are, so that data prepared from them stays valid.
            if not target.exists() or target.read_bytes() != data:
                with name_full_disk(target.absolute()):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(data)
            count, size = count + 1, size + len(data)
    except OSError as error:
        raise UserError(f"--out: {folder}: cannot be written ({error.strerror})") from None
    if not count:
        raise UserError(f"{library}: no Python sources here to train on; use another Python")
    return Corpus(folder=folder, files=count, bytes=size)


def _sources(library: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(library.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            data = path.read_bytes()
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            if data.strip():
                yield path, data


def quickstart_recipe(
    out: Path, corpus: Corpus, overrides: tuple[str, ...] = (), model: Model = "bert"
) -> Recipe:
    """Return the recipe `<model>/quickstart`, with all its inputs and outputs in `out`."""
    source = {"name": "python", "paths": str(corpus.folder), "documents": _DOCUMENTS[model]}
    places = {
        "name": f"{model}-quickstart",
        "data.path": str(out / quickstart_folder("data", model)),
        "data.prepare.sources": [source],
        "storage": str(out / "runs"),
    }
    place_overrides = [f"{key}={json.dumps(value)}" for key, value in places.items()]
    return load_recipe(f"{model}/quickstart", [*place_overrides, *overrides])


def quickstart_folder(name: str, model: Model) -> str:
    """Return the name of the folder with a quickstart's data or exported model."""
    return name if model == "bert" else f"{model}-{name}"


def continue_lines(model: Path) -> list[WrittenLine]:
    """Return the exported GPT's continuations of the beginnings of some lines of Python."""
    from elastrata.inference.language_model import Sampling, continue_text, load_language_model

    loaded, sampling = load_language_model(str(model)), Sampling(temperature=0)
    return [
        WrittenLine(
            prompt=prompt,
            text=continue_text(loaded, prompt, tokens=_NEW_TOKENS, sampling=sampling).text,
        )
        for prompt in _BEGINNINGS
    ]


def fill_masks(model: Path) -> list[FilledLine]:
    """Return the exported model's words for a masked word in some lines of Python."""
    from transformers import AutoTokenizer, pipeline
    from transformers.utils import logging

    quiet: Any = logging  # transformers does not annotate these two
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    mask = AutoTokenizer.from_pretrained(str(model)).mask_token
    fill = pipeline("fill-mask", model=str(model), device="cpu")
    filled = []
    for prompt in _PROMPTS:
        line = prompt.format(mask=mask)
        guesses: list[dict[str, Any]] = fill(line, top_k=3)
        words = tuple(guess["token_str"].strip() for guess in guesses)
        filled.append(FilledLine(line=line, words=words, probability=guesses[0]["score"]))
    return filled


def last_evaluation(run: Storage) -> dict[str, float]:
    """Return the metrics of the run's last evaluation."""
    from elastrata.run import history

    entries = [e for e in history.read_entries(run.sub("history")) if e["kind"] == "evaluated"]
    last = entries[-1] if entries else {}
    return {name: value for name, value in last.items() if name.startswith("eval/")}
