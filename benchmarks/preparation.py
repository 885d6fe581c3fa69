"""MB of text per second of `prepare`, compared with Hugging Face datasets.

    pip install datasets
    python benchmarks/preparation.py ../shared/data

The corpus is WikiText and the .py files of this Python's standard library and site-packages, one
document per file, about 100 MB in one JSON Lines file. The time of `prepare` includes reading,
tokenising, shuffling and writing shards; that of `datasets` is `map` alone, after reading. Both use
two processes and the same tokenizers, which are trained here beforehand. Runs alternate; the result
is the median of three. Every run of `prepare` starts a new Ray session, whose start is timed
separately. Writes benchmarks/results/preparation.json.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import parser_of, write_json_lines, write_result

from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.preparation import PrepareConfig, prepare

CORPUS_BYTES = 100 * 10**6
PROCESSES = 2
RUNS = 3
VOCAB_SIZE = 16384
SEQ_LEN = 512
PACKAGES = ("datasets", "pyarrow", "ray", "tiktoken", "tokenizers", "transformers")


def config(corpus: Path, tokenizer: dict[str, Any]) -> PrepareConfig:
    return PrepareConfig.model_validate(
        {"sources": [{"paths": [str(corpus)]}], "tokenizer": tokenizer, "seq_len": SEQ_LEN}
    )


def train_tokenizer(corpus: Path, kind: str, folder: Path) -> Path:
    """Train a tokenizer by preparing the corpus with it; return its folder."""
    # 8 MB of the corpus are enough to train a tokenizer.
    settings = {"train": kind, "vocab_size": VOCAB_SIZE, "max_bytes": 8 * 2**20}
    with ray_session("local", num_cpus=PROCESSES):
        prepare(config(corpus, settings), str(folder))
    return folder / "tokenizer"


def run_elastrata(corpus: Path, tokenizer: Path) -> tuple[float, float, int]:
    """Return the seconds to start Ray, the seconds to prepare, and the number of tokens."""
    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ray_session("local", num_cpus=PROCESSES):
        ray_time = time.perf_counter()
        manifest = prepare(config(corpus, {"load": str(tokenizer)}), f"{folder}/out")
        end_time = time.perf_counter()
    return ray_time - start_time, end_time - ray_time, manifest.tokens


def run_datasets(corpus: Path, tokenizer: Path) -> tuple[float, int]:
    """Return the seconds of `map`, and the number of tokens."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = loaded_tokenizer(
            batch["text"], add_special_tokens=False, return_attention_mask=False,
            return_token_type_ids=False,
        )  # fmt: skip
        return {"input_ids": encoded["input_ids"]}

    # A new cache, as `map` would otherwise return the result of the previous run.
    with tempfile.TemporaryDirectory() as cache:
        data = datasets.load_dataset("json", data_files=str(corpus), split="train", cache_dir=cache)
        start_time = time.perf_counter()
        mapped = data.map(tokenize, batched=True, num_proc=PROCESSES, remove_columns=["text"])
        seconds = time.perf_counter() - start_time
        # Outside of the timed part.
        tokens = sum(len(chunk.flatten()) for chunk in mapped.data.column("input_ids").chunks)
    return seconds, tokens


def measure(kind: str, corpus: Path, megabytes: float, scratch: Path) -> dict[str, Any]:
    tokenizer = train_tokenizer(corpus, kind, scratch / kind)
    ours, theirs, ray_starts = [], [], []
    tokens = (0, 0)
    for run in range(RUNS):
        start, seconds, our_tokens = run_elastrata(corpus, tokenizer)
        other_seconds, their_tokens = run_datasets(corpus, tokenizer)
        ray_starts.append(start)
        ours.append(megabytes / seconds)
        theirs.append(megabytes / other_seconds)
        tokens = our_tokens, their_tokens
        print(f"{kind} {run}: prepare {ours[-1]:.2f} MB/s, datasets.map {theirs[-1]:.2f} MB/s")
    result = {
        "tokenizer": kind,
        "vocab_size": VOCAB_SIZE,
        "prepare_megabytes_per_second": round(statistics.median(ours), 2),
        "datasets_map_megabytes_per_second": round(statistics.median(theirs), 2),
        "ratio": round(statistics.median(ours) / statistics.median(theirs), 2),
        "runs": {"prepare": [round(x, 2) for x in ours], "map": [round(x, 2) for x in theirs]},
        "tokens_prepare_with_special_and_map": tokens,
        "seconds_to_start_ray": round(statistics.median(ray_starts), 1),
    }
    print(json.dumps(result))
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path, help="folder that holds wikitext/")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # two processes of one thread each, as here
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        size = write_json_lines(arguments.data, corpus, CORPUS_BYTES)
        rows = [measure(kind, corpus, size / 1e6, Path(folder)) for kind in ("bpe", "wordpiece")]
    figures = {
        "machine": f"{os.cpu_count()} cores, shared with other work",
        "corpus_megabytes": round(size / 1e6, 1),
        "processes": PROCESSES,
        "rows": rows,
    }
    write_result("preparation", figures, PACKAGES)


if __name__ == "__main__":
    main()
