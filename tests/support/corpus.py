"""A corpus for tests of the preparation, in every format."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from support.texts import plain_text


def write_corpus(folder: Path) -> Path:
    """Some 7 MB of text, several portions of it: text, JSON Lines and Parquet, plain and packed."""
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"small-{number:02d}.txt").write_text(
            plain_text(number, 500 + 700 * number), encoding="utf-8"
        )
    large = [plain_text(100 + number, 3000 + 97 * number) for number in range(60)]
    (folder / "large.jsonl").write_text(
        "".join(
            json.dumps({"id": number, "text": text}) + "\n"
            for number, text in enumerate(large * 10)
        ),
        encoding="utf-8",
    )
    (folder / "packed.txt.gz").write_bytes(gzip.compress("\n\n".join(large[:30]).encode(), mtime=0))
    rows = pa.table({"text": [plain_text(900 + number, 800) for number in range(300)]})
    pq.write_table(rows, folder / "rows.parquet")
    return folder


def whole_config(corpus: str, **changes: object) -> dict[str, object]:
    """A configuration that uses most of what there is."""
    return {
        "sources": [
            {"name": "all", "paths": [corpus], "documents": "paragraph", "weight": 1.5},
        ],
        "tokenizer": {"train": "wordpiece", "vocab_size": 600, "max_bytes": 200_000},
        "seq_len": 64,
        "stripe_size": 256,
        "stripes_per_shard": 8,
        "held_out": 0.1,
        **changes,
    }  # fmt: skip
