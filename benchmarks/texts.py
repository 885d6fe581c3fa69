"""The texts that benchmarks train on: WikiText, and the sources of this Python and its packages."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from processes import elastrata

from elastrata.launch.quickstart import collect_corpus

Documents = Literal["whole", "paragraph"]
"""Articles and files as they are, or their paragraphs."""
VOCABULARY, NATURAL_LENGTH = 8192, 512
ARTICLE = r"^ = [^=].* = $"


def wikitext_source(wikitext: Path, part: str, documents: Documents = "whole") -> dict[str, str]:
    """One file of WikiText, for a recipe: `train` or `validation`."""
    article = {"document_start": ARTICLE} if documents == "whole" else {"documents": "paragraph"}
    return {"name": part, "paths": str((wikitext / f"{part}.txt").resolve()), **article}


def sources(wikitext: Path, folder: Path, documents: Documents) -> list[dict[str, str]]:
    """WikiText's two files and the library, for a recipe.

    Args:
        wikitext: the folder with train.txt and validation.txt.
        folder: gets a copy of the library's sources.
        documents: into which the texts are taken apart.
    """
    file = "file" if documents == "whole" else "paragraph"
    library = collect_corpus(folder).folder
    return [
        *(wikitext_source(wikitext, part, documents) for part in ("train", "validation")),
        {"name": "python", "paths": str(library), "documents": file},
    ]


def three_sources(wikitext: Path, folder: Path) -> dict[str, str]:
    """The text of the recipe `gpt/mixture`: the paths of its sources, by their names.

    Args:
        wikitext: the folder with train.txt.
        folder: gets copies of the modules of this Python's library, its packages apart, and of the
            pages of documentation, Markdown and reStructuredText, that lie in installed packages.
    """
    library, packages = (Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib"))
    pages = (page for page in packages.rglob("*") if page.suffix in (".md", ".rst"))
    _copy(library.glob("*.py"), library, folder / "python")
    _copy((page for page in pages if _is_documentation(page)), packages, folder / "docs")
    return {
        "wikitext": str((wikitext / "train.txt").resolve()),
        "python": str(folder / "python"),
        "docs": str(folder / "docs"),
    }


def _is_documentation(page: Path) -> bool:
    return not any(name in part.lower() for part in page.parts for name in ("licens", "test"))


def _copy(files: Iterable[Path], root: Path, folder: Path) -> None:
    """Those that are UTF-8; one that is there already stays, so that its data set stays valid."""
    for file in sorted(files):
        target = folder / file.relative_to(root)
        if target.exists():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def prepare(recipe: Path, values: dict[str, Any]) -> None:
    """Writes a recipe, and its data set unless it is there."""
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    if not Path(values["data"]["path"], "manifest.json").exists():
        elastrata("prepare", str(recipe))


def natural_length_sources(wikitext: Path) -> list[dict[str, str]]:
    """What people and programmers write in one piece, for a recipe: paragraphs of WikiText,
    functions and classes of the library."""
    library = Path(sysconfig.get_path("stdlib")) / "*.py"
    definition = {"document_start": r"\s*(async def|def|class) "}
    return [
        {**wikitext_source(wikitext, "train", "paragraph"), "name": "wikitext"},
        {"name": "python", "paths": str(library), **definition},
    ]


def prepare_natural_lengths(wikitext: Path, out: Path) -> str:
    """Makes a data set of `natural_length_sources`, cut at 512 tokens. Returns its folder."""
    overrides = [
        f"data.prepare.sources={json.dumps(natural_length_sources(wikitext))}",
        "data.prepare.held_out=null",
        f"data.prepare.tokenizer={{train: wordpiece, vocab_size: {VOCABULARY}}}",
        f"data.prepare.seq_len={NATURAL_LENGTH}",
        "data.prepare.stripe_size=512",
        f"data.path={out}",
    ]
    elastrata("prepare", "bert/mini", *overrides)
    return str(out)


def write_json_lines(data: Path, target: Path, most_bytes: int) -> int:
    """Writes WikiText and the .py files of the library and of the installed packages, a document a
    file, until they are so long; returns the bytes of text.

    Args:
        data: the folder that holds wikitext/.
        target: a JSON Lines file.
        most_bytes: the document that reaches them is the last.
    """
    size = 0
    with target.open("w", encoding="utf-8") as stream:
        for text in _documents(data / "wikitext"):
            stream.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= most_bytes:
                break
    return size


def _documents(wikitext: Path) -> Iterator[str]:
    yield (wikitext / "train.txt").read_text(encoding="utf-8")
    yield (wikitext / "validation.txt").read_text(encoding="utf-8")
    for kind in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[kind]).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield text
