"""A run of a tiny GPT with a tokenizer of its own, trained in this process."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from elastrata_pipelines.format import HELD_OUT, FileEntry, Manifest
from elastrata_pipelines.format.manifest import TOKENIZER_DIR
from elastrata_pipelines.preparation.config import TokenizerConfig
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.storage import Storage
from support.lone_run import lone_run
from support.synthetic import SEQ_LEN, write_data_set
from support.texts import plain_text

TEXT = "Some say the world will end in fire, some say in ice. "
GPT = {
    "name": "gpt",
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "max_positions": SEQ_LEN,
}


def run_with_tokenizer(folder: Path, kind: str = "bpe", **changes: Any) -> Path:
    """Trains a tiny model on random tokens of a tokenizer that knows `TEXT`; returns the run's
    folder. By default a GPT; with `kind="wordpiece"` and another workload a BERT."""
    texts = [TEXT * 9, plain_text(0, 4000)]  # for more ids than samples have
    files = train_tokenizer(texts, TokenizerConfig(train=kind, vocab_size=300), seq_len=SEQ_LEN)
    data = Storage(str(folder / "data"))
    manifest = write_data_set(folder / "data", samples=200, held_out=40)
    held_out = Manifest.read(data.sub(HELD_OUT))
    held_out = held_out.model_copy(update={"vocabulary": files.vocabulary()})
    held_out.write(data.sub(HELD_OUT))
    entries = []
    for name, content in files.contents.items():
        path, content_bytes = f"{TOKENIZER_DIR}/{name}", content.encode()
        data.write(content_bytes, path)
        sha256 = hashlib.sha256(content_bytes).hexdigest()
        entries.append(FileEntry(path=path, bytes=len(content_bytes), sha256=sha256))
    changed = {
        "files": (*manifest.files, *entries),
        "vocabulary": files.vocabulary(),
        "held_out": held_out.fingerprint,
    }
    manifest.model_copy(update=changed).write(data)
    return lone_run(folder, "run", **{"workload": GPT, **changes})
