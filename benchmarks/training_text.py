"""The text of benchmarks that train: WikiText and the sources of this Python's standard library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from wikitext import command

from elastrata.launch.quickstart import collect_corpus

Documents = Literal["whole", "paragraph"]
"""Articles and files as they are, or their paragraphs."""
VOCABULARY = 8192
ARTICLE = r"^ = [^=].* = $"


def sources(wikitext: Path, folder: Path, documents: Documents) -> list[dict[str, Any]]:
    """The sources of both, for a recipe.

    Args:
        wikitext: the folder with train.txt and validation.txt.
        folder: gets a copy of the library's sources.
        documents: what a document is.
    """
    article = {"document_start": ARTICLE} if documents == "whole" else {"documents": "paragraph"}
    file = {"documents": "file"} if documents == "whole" else {"documents": "paragraph"}
    texts = [wikitext / f"{part}.txt" for part in ("train", "validation")]
    library = collect_corpus(folder).folder
    return [
        *({"name": text.stem, "paths": str(text.resolve()), **article} for text in texts),
        {"name": "python", "paths": str(library), **file},
    ]


def prepare(recipe: Path, values: dict[str, Any]) -> None:
    """Writes a recipe, and its data set unless it is there."""
    recipe.write_text(yaml.safe_dump(values))
    if not Path(values["data"]["path"], "manifest.json").exists():
        command("prepare", str(recipe))
