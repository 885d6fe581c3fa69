"""Real tokens per second that reach one consumer in shuffled order, by loader.

    python -m venv ../rivals
    ../rivals/bin/pip install mosaicml-streaming litdata grain datasets webdataset torch==2.13.0
    python benchmarks/data_loading.py ../shared/data --python ../rivals/bin/python

The corpus is WikiText and the .py files of this Python's standard library and site-packages,
prepared with a BPE vocabulary of 8,192 into samples of up to 512 tokens at their natural lengths.
Every loader gets the same samples in its format and must deliver all of them in an epoch: number of
samples, number of tokens and a checksum are compared. Then the loaders are measured by turns, each
in a new process. The figures are medians: the tokens per second of batches of 32 concatenated
samples (uint16, without padding, each token read once by the consumer), and the seconds from
opening the data to the first batch, without imports and the start of Ray. All data is in the page
cache.

`--scratch DIR` keeps the corpus and its formats for the next call.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    last_line,
    medians,
    parser_of,
    scratch_folder,
    versions_in,
    write_json_lines,
    write_result,
)

from elastrata.driver.ray_session import ray_session
from elastrata_pipelines.format import Manifest, read_stripes
from elastrata_pipelines.preparation import PrepareConfig, prepare
from elastrata_pipelines.storage import Storage

MEGABYTES = 280
ROUNDS = 3
# 1-minute load average.
QUIET_LOAD = 1.0
FORMATS = ("memmap", "mosaicml_streaming", "litdata", "grain", "huggingface", "webdataset")
LOADERS = (
    ("elastrata", "through Ray Data"),
    ("elastrata", "in process"),
    ("memmap", "in process"),
    *((name, variant) for name in FORMATS[1:] for variant in ("in process", "2 workers")),
    ("grain", "16 threads"),
)
RIVAL_PACKAGES = (
    *("mosaicml-streaming", "litdata", "grain", "array-record", "datasets", "webdataset"),
    *("torch", "numpy", "pyarrow"),
)
Loader = tuple[str, str]
"""A loader of data_loaders.py and one of its variants."""


@dataclass(frozen=True)
class Bench:
    """Location of the formats, and the Python that reads each."""

    scratch: Path
    rivals: Path
    """Python of the environment with the rivals."""

    def write_formats(self) -> None:
        """Write the formats that are missing."""
        for name in FORMATS[1:]:
            if not (self.scratch / name).exists():
                self.run("write", (name, ""))

    def run(self, action: str, loader: Loader) -> dict[str, Any]:
        """Run data_loaders.py in a new process and return its output."""
        name, variant = loader
        # The rivals are installed in another environment.
        python = sys.executable if name in ("elastrata", "memmap") else str(self.rivals)
        script = Path(__file__).with_name("data_loaders.py")
        result: dict[str, Any] | None = last_line(
            [python, script, action, name, variant, self.scratch / "memmap", self.scratch / name],
            HF_HUB_OFFLINE="1",
            TOKENIZERS_PARALLELISM="false",
        )
        return result or {}


def prepare_corpus(data: Path, megabytes: int, scratch: Path) -> None:
    """Prepare Elastrata's data set, and its samples as plain arrays for all other loaders."""
    if (scratch / "memmap").exists():
        return
    corpus = scratch / "corpus.jsonl"
    write_json_lines(data, corpus, megabytes * 10**6)
    config = {
        "sources": [{"paths": [str(corpus)]}],
        "tokenizer": {"train": "bpe", "vocab_size": 8192},
        "seq_len": 512,
    }
    with ray_session("local"):
        prepare(PrepareConfig.model_validate(config), str(scratch / "elastrata"))
    corpus.unlink()
    write_arrays(scratch / "elastrata", scratch / "memmap")


def write_arrays(data_set: Path, folder: Path) -> None:
    storage = Storage(str(data_set))
    manifest = Manifest.read(storage)
    folder.mkdir()
    lengths = manifest.read_lengths(storage)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    with (folder / "tokens.bin").open("wb") as stream:
        for stripe in range(manifest.stripes):
            (table,) = read_stripes(storage, manifest, [stripe])
            stream.write(b"".join(table["tokens"].to_pylist()))


def check(bench: Bench) -> dict[str, int]:
    """Read all samples once with every loader; return their numbers and checksum.

    Raises:
        RuntimeError: a loader delivers other samples than the memory map.
    """
    keys = ("samples", "tokens", "checksum")
    results = {loader: bench.run("check", loader) for loader in LOADERS}
    totals = {loader: {key: result[key] for key in keys} for loader, result in results.items()}
    # The plainest loader is the reference.
    expected = totals["memmap", "in process"]
    deviating = {loader: total for loader, total in totals.items() if total != expected}
    if deviating:
        raise RuntimeError(f"not the same samples: {deviating}, expected {expected}")
    return expected


def wait_for_quiet(minutes: float) -> float:
    """Wait until the machine is nearly idle, for a limited time; return the load."""
    deadline = time.monotonic() + 60 * minutes
    while (load := os.getloadavg()[0]) > QUIET_LOAD and time.monotonic() < deadline:
        time.sleep(15)
    return load


def measure(bench: Bench, rounds: int) -> dict[Loader, list[dict[str, float]]]:
    """Measure all loaders by turns."""
    results: dict[Loader, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
    for number in range(rounds):
        for loader in LOADERS:
            result = bench.run("measure", loader)
            results[loader].append(result)
            rate = result["tokens_per_second"] / 1e6
            print(f"{number} {', '.join(loader)}: {rate:.1f} M tokens/s", flush=True)
    return results


def row(loader: Loader, results: list[dict[str, float]]) -> dict[str, Any]:
    rates = [result["tokens_per_second"] / 1e6 for result in results]
    row = {
        "loader": loader[0],
        "variant": loader[1],
        "million_tokens_per_second": round(statistics.median(rates), 2),
        "rounds": [round(rate, 2) for rate in rates],
    }
    of_start = ("seconds_to_first_batch", "seconds_to_import", "seconds_to_start_ray")
    starts = medians([{key: result[key] for key in of_start} for result in results], 3)
    return {**row, **starts}


def main() -> None:
    parser = parser_of(__doc__, rounds=ROUNDS)
    parser.add_argument("data", type=Path, help="folder that holds wikitext/")
    parser.add_argument("--python", type=Path, required=True, help="a Python with the rivals")
    parser.add_argument("--scratch", type=Path, help="folder for the formats, kept")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="size of the text")
    parser.add_argument(
        "--wait-minutes", type=float, default=0, help="for a load below 1 before the first round"
    )
    arguments = parser.parse_args()
    with scratch_folder(arguments.scratch) as scratch:
        prepare_corpus(arguments.data, arguments.megabytes, scratch)
        bench = Bench(scratch, arguments.python)
        bench.write_formats()
        load = wait_for_quiet(arguments.wait_minutes)
        found = measure(bench, arguments.rounds)
        load_after = os.getloadavg()[0]
        corpus = check(bench)
    rows = [row(loader, results) for loader, results in found.items()]
    figures = {
        "machine_note": f"shared; 1-minute load before the first round {load:.2f}, "
        f"after the last {load_after:.2f}",
        "corpus": corpus,
        "rival_versions": versions_in(arguments.python, RIVAL_PACKAGES),
        "rows": sorted(rows, key=lambda row: -row["million_tokens_per_second"]),
    }
    write_result("data_loading", figures, ("elastrata", "ray", "pyarrow", "numpy"))


if __name__ == "__main__":
    main()
