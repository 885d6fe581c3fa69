"""The first half hour on a GPU: whether models are right, how fast, and how much memory they take.

    make gpu
    python benchmarks/gpu.py --results gpu.jsonl --minutes 10
    python benchmarks/gpu.py --device cpu --tiny

A table of cases, most valuable first; nothing is needed but PyTorch, the checkout and a few small
wheels (`make gpu-wheels`). Every case has a process and a time of its own, and is a row of a JSON
Lines file, written as soon as it ends: its `status` is `ok`, `wrong` (something else was computed
than should be), `out of memory`, `timeout`, `crashed` or `failed`. The next call goes on after the
last row; `--again` repeats what did not end well. Of cases that differ in what is computed again
the first that fits into memory counts.

Samples are random tokens, of full length or of natural ones: of English Wikipedia's, or drawn from
the histogram of `--lengths` (docs/commands.md). MFU halves attention where it is causal, and does
not count what is computed again; its peak is that of the device for dense bf16.

`--device cpu --tiny` tries the table without a GPU: all but compilation and what CUDA does, with
tiny models. `--device fake` tries the cases of speed, with models of their real sizes, on tensors
without numbers.

This file and those it imports need nothing but Python's own library, so that they can tell what is
missing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_needs import ROOT, installed
from gpu_process import FAKE
from gpu_rows import Rows
from gpu_table import REHEARSED, TABLE

LENGTHS = ROOT / "tests" / "data" / "wikipedia_lengths_512.json"
"""Of natural samples: English Wikipedia's, with their source."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"), metavar="FILE")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all of it; default 30")
    parser.add_argument("--cases", default="", help="begin with one of these words, commas between")
    parser.add_argument("--again", action="store_true", help="what did not end well, once more")
    parser.add_argument(
        "--lengths", type=Path, metavar="FILE", default=LENGTHS, help="JSON histogram"
    )
    parser.add_argument("--device", choices=("cuda", "cpu", FAKE), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", metavar="FOLDER")
    parser.add_argument("--list", action="store_true", help="name the cases, run none")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    words = tuple(arguments.cases.split(","))
    cases = [case for case in TABLE if case.name.startswith(words)]
    if arguments.device == FAKE:
        cases = [case for case in cases if case.function in REHEARSED]
    if arguments.list:
        for case in cases:
            print(f"{case.seconds:4.0f} s  {case.name}")
        return
    environment = dict(installed(arguments.wheels.resolve()))
    environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as `elastrata` has it
    if arguments.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    results = arguments.results.resolve()
    options = {
        "device": arguments.device,
        "is_tiny": arguments.tiny,
        "histogram": str(arguments.lengths.resolve()),
        "folder": str(results.parent),
    }
    rows = Rows(
        results,
        minutes=arguments.minutes,
        again=arguments.again,
        options=options,
        environment=environment,
    )
    rows.run(cases)
    statuses = [row["status"] for row in rows.rows.values()]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    print(f"{results}: {len(statuses)} rows: {counts}")


if __name__ == "__main__":
    main()
