"""A corpus of natural lengths: what people and programmers write in one piece, cut at 512 tokens.

Paragraphs of WikiText, and functions and classes of the running Python's standard library.
"""

from __future__ import annotations

import json
import subprocess
import sysconfig
from pathlib import Path

SEQ_LEN, VOCABULARY = 512, 8192


def prepare_corpus(wikitext: Path, out: Path) -> str:
    """Makes a data set with `elastrata prepare`; returns its folder.

    Args:
        wikitext: folder with `train.txt`.
        out: folder for the data set.
    """
    library = Path(sysconfig.get_path("stdlib")) / "*.py"
    sources = [
        {"name": "wikitext", "paths": str((wikitext / "train.txt").resolve()),
         "documents": "paragraph"},
        {"name": "python", "paths": str(library),
         "document_start": r"\s*(async def|def|class) "},
    ]  # fmt: skip
    overrides = [
        f"data.prepare.sources={json.dumps(sources)}",
        "data.prepare.held_out=null",
        f"data.prepare.tokenizer={{train: wordpiece, vocab_size: {VOCABULARY}}}",
        f"data.prepare.seq_len={SEQ_LEN}",
        "data.prepare.stripe_size=512",
        f"data.path={out}",
    ]
    subprocess.run(["elastrata", "prepare", "bert/mini", *overrides], check=True)
    return str(out)
