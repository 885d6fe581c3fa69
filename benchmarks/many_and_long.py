"""Very many files and very long documents: seconds and memory of their preparation.

    python benchmarks/many_and_long.py
    python benchmarks/many_and_long.py --pipelines OTHER_CHECKOUT/pipelines --most-files 20000

Files have some 60 bytes each; the long document is one line of 60 MB of words. Every measurement
has a process of its own, which does by itself what `prepare` gives to Ray's workers, so that its
CPU seconds can be told from those of other work on the machine: finding the files and reading
their documents; training a tokenizer on the line; tokenising it, with the fast encoders and with
the tokenizer itself. Peak memory is what the process takes beyond its libraries.
Results go to benchmarks/results/many_and_long.json.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_FILES = (5_000, 20_000, 60_000, 100_000)
LINE_BYTES = 60 * 10**6
PORTION_BYTES = 2 * 2**20
VOCAB_SIZE = 8000
PACKAGES = ("pyarrow", "tiktoken", "tokenizers")
TASKS = ("train bpe", "train wordpiece", "encode bpe", "encode wordpiece", "encode exact")


def words(size: int) -> str:
    rng = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(rng.choices(letters, k=rng.randint(1, 11))) for _ in range(20_000)]
    return " ".join(rng.choices(known, k=size // 6))[:size]


def write_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        text = f"This is the text number {number}, a short one of a few words.\n"
        (folder / f"{number:06d}.txt").write_text(text)


def read_files(folder: str) -> dict[str, Any]:
    from elastrata_pipelines.preparation import SourceConfig
    from elastrata_pipelines.preparation.documents import read_documents
    from elastrata_pipelines.preparation.portions import group_files, read_portions
    from elastrata_pipelines.preparation.sources import find_files

    config = SourceConfig(paths=(folder,), name="s")
    limit = 64 * 2**20
    found: Any = find_files(0, config)
    groups = group_files(getattr(found, "files", None) or found[0], PORTION_BYTES)
    documents = 0
    for group in groups:
        for portion in read_portions(group, config, size=PORTION_BYTES, max_document_bytes=limit):
            read = read_documents(portion, config, max_document_bytes=limit)
            documents += len(read.documents)
    return {"documents": documents, "portions": len(groups)}


def train(kind: str, text: str) -> Any:
    from elastrata_pipelines.preparation import TokenizerConfig
    from elastrata_pipelines.preparation.training import train_tokenizer
    from elastrata_pipelines.preparation.work import _pieces

    config = TokenizerConfig.model_validate({"train": kind, "vocab_size": VOCAB_SIZE})
    return train_tokenizer(list(_pieces(text)), config, seq_len=512)


def encode(kind: str, text: str) -> dict[str, Any]:
    from elastrata_pipelines.preparation import encoders

    files = train("bpe" if kind == "exact" else kind, text[: 10**6])
    encoder = encoders.make_encoder(files.tokenizer_json)
    if kind == "exact":
        encoder._fast = None
    tokens, _, name = encoder.encode([text])
    return {"tokens": len(tokens), "encoder": name}


def _usage() -> tuple[float, int]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss // 1024


def measure_here(task: str, path: str) -> dict[str, Any]:
    """Does one task in this process."""
    importlib.import_module("elastrata_pipelines.preparation.work")  # not what is measured
    kind = task.split()[-1]
    text = "" if task == "read" else Path(path).read_text()
    (cpu, _), begun = _usage(), time.perf_counter()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    told = {"read": lambda: read_files(path), "train": lambda: train(kind, text)}.get(
        task.split()[0], lambda: encode(kind, text)
    )()
    wall = time.perf_counter() - begun
    after, peak = _usage()
    return {
        "task": task,
        **(told if isinstance(told, dict) else {}),
        "cpu_seconds": round(after - cpu, 1),
        "wall_seconds": round(wall, 1),
        "peak_megabytes": peak - before // 2**20,
    }


def measure(task: str, path: Path, pipelines: Path | None) -> dict[str, Any]:
    environment = dict(os.environ, TOKENIZERS_PARALLELISM="false")
    if pipelines:
        environment["PYTHONPATH"] = str(pipelines.resolve())
    command = [sys.executable, __file__, "--here", task, str(path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", nargs=2, metavar=("TASK", "PATH"), help="measure in this process")
    parser.add_argument("--pipelines", type=Path, help="the pipelines/ of another checkout")
    parser.add_argument("--most-files", type=int, default=max(NUM_FILES))
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/many_and_long.json"
    )
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(*arguments.here)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for count in (count for count in NUM_FILES if count <= arguments.most_files):
            files = Path(folder) / str(count)
            write_files(files, count)
            rows.append({"files": count} | measure("read", files, arguments.pipelines))
        line = Path(folder) / "line.txt"
        line.write_text(words(LINE_BYTES))
        rows += [measure(task, line, arguments.pipelines) for task in TASKS]
    result = {
        "command": " ".join(["python benchmarks/many_and_long.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, shared with other work",
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "line_megabytes": LINE_BYTES / 10**6,
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
