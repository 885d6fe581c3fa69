"""Balance and padding of dealt batches at many world sizes, compared with random dealing.

    python benchmarks/balance.py ../shared/data

The folder contains `wikipedia_lengths_512.json` (lengths of BERT's Wikipedia samples, Krell et al.)
and `wikitext/train.txt`. The text is prepared here with a new WordPiece tokenizer and cut at 512
tokens, as articles, nearly all of which fill samples to the last token, and as paragraphs. The work
of a row of s tokens is 24 h^2 s + 4 h s^2 with h = 1024, one layer's FLOPs. Every micro-batch has
at most 8,192 tokens. Writes benchmarks/results/balance.json.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from harness import ARTICLE, parser_of, write_result

from elastrata.bench.samples import read_histogram
from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.balance import batches_of_order, draw_batches, measure_balance
from elastrata_pipelines.deal import Ints, WorkModel
from elastrata_pipelines.format import Manifest
from elastrata_pipelines.order import Order
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.storage import Storage

# Not only powers of two: an elastic group may have any size.
WORKERS = (3, 8, 64, 777, 1024)
SAMPLES_EACH = (4, 8, 16)
STEPS = 50
# BERT-large's hidden size.
HIDDEN = 1024
WORK = WorkModel(linear=24 * HIDDEN**2, quadratic=4 * HIDDEN)
TOKENS_PER_MICRO_BATCH = 8192
SEQ_LEN = 512

Batches = Callable[[int], Iterator[Ints]]


def wikitext_batches(text: Path, **documents: str) -> Batches:
    """Return batches in the order of a data set prepared from WikiText."""
    config = PrepareConfig.model_validate(
        {
            "sources": [{"paths": [str(text)], **documents}],
            "tokenizer": {"train": "wordpiece", "vocab_size": 8192, "lowercase": True},
            "seq_len": SEQ_LEN,
        }
    )
    with tempfile.TemporaryDirectory() as folder, ray_session("local"):
        manifest = prepare(config, f"{folder}/out")
        lengths = manifest.read_lengths(Storage(f"{folder}/out"))
    return _ordered(manifest, lengths)


def _ordered(manifest: Manifest, lengths: np.ndarray) -> Batches:
    order = Order(
        num_samples=manifest.samples, stripe_size=manifest.stripe_size, window_stripes=8, seed=0
    )
    return lambda batch_size: batches_of_order(lengths, order, batch_size=batch_size, steps=STEPS)


def wikipedia_batches(counts: Path) -> Batches:
    """Return batches of random lengths from the length histogram of Wikipedia."""
    histogram = read_histogram(str(counts))
    return lambda batch_size: draw_batches(histogram, batch_size=batch_size, steps=STEPS)


def measure(name: str, batches: Batches) -> Iterator[dict[str, Any]]:
    for workers in WORKERS:
        # Fewer samples per worker are harder to balance.
        for samples_per_worker in SAMPLES_EACH:
            balance = measure_balance(
                batches(workers * samples_per_worker),
                workers=workers,
                tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
                work=WORK,
            )
            values = {key: round(value, 5) for key, value in asdict(balance).items()}
            row = {"data": name, "workers": workers, "samples_each": samples_per_worker, **values}
            print(
                f"{name:>10} {workers:5d} x {samples_per_worker:2d}: max/mean "
                f"{row['imbalance_max_over_mean']:.4f} (possible {row['imbalance_least']:.4f}, "
                f"worst step {row['imbalance_worst']:.4f}), random {row['imbalance_random']:.3f}"
            )
            yield row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="folder with the length histogram and WikiText")
    data: Path = parser.parse_args().data
    text = data / "wikitext" / "train.txt"
    rows = [
        *measure("wikipedia", wikipedia_batches(data / "wikipedia_lengths_512.json")),
        *measure("articles", wikitext_batches(text, document_start=ARTICLE)),
        *measure("paragraphs", wikitext_batches(text, documents="line")),
    ]
    figures = {
        "machine": "arithmetic only: the figures do not depend on the machine",
        "steps": STEPS,
        "work": asdict(WORK),
        "tokens_per_micro_batch": TOKENS_PER_MICRO_BATCH,
        "rows": rows,
    }
    write_result("balance", figures, ("numpy",))


if __name__ == "__main__":
    main()
