"""Useful tokens per second of training ModernBERT, compared with the Hugging Face Trainer.

    python benchmarks/modernbert.py ../shared/data/wikitext

Both train ModernBERT-mini, the Trainer as `ModernBertForMaskedLM`, from the same weights and on the
same samples of natural lengths: WikiText's paragraphs and the functions and classes of this
Python's standard library, up to 1,024 tokens, with a BPE vocabulary of 8,192. Batch size, fused
AdamW, clipping and share of masked tokens are equal; fp32, one thread. The Trainer's batches are
random and padded to their longest sample, or grouped by length (it trains on five of every 50
batches, evenly spread); it uses PyTorch's fused attention. Elastrata runs as `elastrata train` with
one worker; its data pipeline, history and MLflow are included in the time. Measured as in
trainers.py. The Python that runs this script needs accelerate for the Trainer.

`--scratch DIR` keeps data and rounds; a later call adds its rounds to them. Writes
results/modernbert.json.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness import VOCABULARY, natural_length_sources, parser_of, scratch_folder, write_result
from trainers import (
    BATCH_SIZE,
    DEFAULT,
    ONE,
    Bench,
    data_set,
    measure,
    prepare_trainers,
    ratio,
    row,
)

STEPS, ROUNDS, LONGEST = 12, 3, 1024
RIVALS = (DEFAULT, "Hugging Face Trainer, grouped by length")
PACKAGES = ("elastrata", "ray", "torch", "transformers", "accelerate")


def prepare_all(wikitext: Path, scratch: Path) -> None:
    """Prepare the recipe, data and model that the trainers need."""
    prepared = {
        "sources": natural_length_sources(wikitext),
        "tokenizer": {"train": "bpe", "vocab_size": VOCABULARY},
        "seq_len": LONGEST,
        "packing": "none",
        "held_out": None,
    }
    prepare_trainers(scratch, "modernbert/mini", prepared, {"steps": STEPS})


def main() -> None:
    parser = parser_of(__doc__, rounds=ROUNDS, wikitext=True)
    parser.add_argument("--scratch", type=Path, help="folder for data and rounds, kept")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with scratch_folder(arguments.scratch) as scratch:
        prepare_all(arguments.wikitext, scratch)
        python = Path(sys.executable)
        # Without Composer, this Python serves as both environments.
        rounds = measure(Bench(scratch, python, python), arguments.rounds, (*RIVALS, ONE))
        data = data_set(scratch)
    figures = {
        "model": "ModernBERT-mini",
        "data": data,
        "samples_per_step": BATCH_SIZE,
        "one_worker_over_the_default": ratio(ONE, RIVALS[:1], rounds),
        "one_worker_over_the_best": ratio(ONE, RIVALS, rounds),
        "rows": [row(trainer, rounds) for trainer in (*RIVALS, ONE)],
    }
    write_result("modernbert", figures, PACKAGES)


if __name__ == "__main__":
    main()
