"""Very many files and very long documents: seconds and memory of their preparation.

    python benchmarks/many_and_long.py
    python benchmarks/many_and_long.py --pipelines OTHER_CHECKOUT/pipelines --most-files 20000

Files have some 60 bytes each; the long document is one line of 60 MB of words. Every measurement
has a process of its own, which does by itself what `prepare` gives to Ray's workers, so that its
CPU seconds can be told from those of other work on the machine: finding the files and reading
their documents; training a tokenizer on the line; turning it into ids, with the fast encoders and
with the tokenizer itself; and all that becomes of it on the way from its file to a run of samples.
Peak memory is what the process takes beyond its libraries.

`prepare` itself is measured as well, with its Ray: CPU seconds and peak memory of all its processes
(memory that several share counted once), beside those of a text of a few bytes.
Writes benchmarks/results/many_and_long.json, or another that `--name` says.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from harness import parser_of, write_result
from processes import last_line

NUM_FILES = (5_000, 20_000, 60_000, 100_000)
LINE_BYTES = 60 * 10**6
PORTION_BYTES = 2 * 2**20
VOCAB_SIZE = 8000
PACKAGES = ("pyarrow", "tiktoken", "tokenizers")
TASKS = (
    *("train bpe", "train wordpiece", "encode bpe", "encode wordpiece", "encode exact"),
    *("samples none", "samples concat", "samples best_fit"),
)
SAMPLE_SECONDS = 0.5
Work = Callable[[], dict[str, Any]]
"""The work that is measured, after all that is not."""


def words(size: int) -> str:
    rng = random.Random(2)
    letters = "abcdefghijklmnopqrstuvwxyz"
    known = ["".join(rng.choices(letters, k=rng.randint(1, 11))) for _ in range(20_000)]
    return " ".join(rng.choices(known, k=size // 6))[:size]


def write_files(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        text = f"This is the text number {number}, a short one of a few words.\n"
        (folder / f"{number:06d}.txt").write_text(text, encoding="utf-8")


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


def encode(kind: str, path: str) -> Work:
    from elastrata_pipelines.preparation import encoders

    text = Path(path).read_text(encoding="utf-8")
    files = train("bpe" if kind == "exact" else kind, text[: 10**6])
    encoder = encoders.make_encoder(files.tokenizer_json)
    if kind == "exact":
        encoder._fast = None
    encoder.encode([text[:100]])

    def work() -> dict[str, Any]:
        tokens, _, name = encoder.encode([text])
        return {"tokens": len(tokens), "encoder": name}

    return work


def samples(packing: str, path: str) -> Work:
    """From a file to a run of samples, through the rows that pass from process to process."""
    from elastrata_pipelines.preparation import PrepareConfig, pipeline, work
    from elastrata_pipelines.preparation.sources import find_files
    from elastrata_pipelines.storage import Storage

    kind = "wordpiece" if packing == "none" else "bpe"
    with open(path, encoding="utf-8") as stream:
        files = train(kind, stream.read(10**6))
    values = {"sources": [{"paths": path}], "tokenizer": {"train": kind}, "packing": packing}
    config = PrepareConfig.model_validate({**values, "seq_len": 128, "held_out": 0.01})
    group = work.Group(0, tuple(find_files(0, config.all_sources[0]).files))

    def measured() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            return turned(Storage(folder))

    def turned(runs: Storage) -> dict[str, Any]:
        tokenize = work.TokenizeWork(
            config=config, tokenizer_json=files.tokenizer_json, frame=files.frame(),
            pair_frame=None, token_dtype="uint16", unknown_id=None, runs=runs,
        )  # fmt: skip
        read = pipeline._Stage(work.ReadWork(config, PORTION_BYTES))
        stage = pipeline._Stage(lambda portion: (tokenize(portion),))
        rows = [row for table in read(pipeline._row(group)) for row in stage(table)]
        (tokenized,) = (value for row in rows for value in pipeline._values(row))
        count = sum(len(run.ids) for run in tokenized.runs if run)
        return {"samples": count, "encoder": tokenized.encoder}

    return measured


def prepare(path: Path, folder: Path) -> dict[str, Any]:
    """`elastrata prepare`, and what all its processes take together."""
    command = [sys.executable, "-m", "elastrata", "prepare", "--text", str(path)]
    begun, seconds, peak = time.perf_counter(), dict[int, float](), 0
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        driver = psutil.Popen(
            [*command, "--out", str(folder / "data"), "--overwrite", "--held-out", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        while driver.poll() is None:
            peak = max(peak, sum(_memory(process, seconds) for process in _tree(driver)))
            time.sleep(SAMPLE_SECONDS)
    if driver.returncode:
        raise RuntimeError((folder / "output.txt").read_text(encoding="utf-8"))
    row = {
        "task": f"prepare {path.name}",
        "cpu_seconds": round(sum(seconds.values()), 1),
        "wall_seconds": round(time.perf_counter() - begun, 1),
        "peak_megabytes": peak // 2**20,
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(row), flush=True)
    return row


def _tree(driver: Any) -> list[Any]:
    with contextlib.suppress(psutil.Error):
        return [driver, *driver.children(recursive=True)]
    return []


def _memory(process: Any, seconds: dict[int, float]) -> int:
    """Bytes of a process, its share of what it shares with others; its CPU seconds are noted."""
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        seconds[process.pid] = times.user + times.system
        return int(process.memory_full_info().pss)
    return 0


def _seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _status(key: str) -> int:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) // 1024


def measure_here(task: str, path: str) -> dict[str, Any]:
    """Does one task in this process."""
    importlib.import_module("elastrata_pipelines.preparation.work")  # not what is measured
    kind = task.split()[-1]
    work = {
        "read": lambda: lambda: read_files(path),
        "train": lambda: _training(kind, path),
        "encode": lambda: encode(kind, path),
        "samples": lambda: samples(kind, path),
    }[task.split()[0]]()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is counted from here
    cpu, begun, before = _seconds(), time.perf_counter(), _status("VmRSS")
    told = work()
    return {
        "task": task,
        **told,
        "cpu_seconds": round(_seconds() - cpu, 1),
        "wall_seconds": round(time.perf_counter() - begun, 1),
        "peak_megabytes": _status("VmHWM") - before,
    }


def _training(kind: str, path: str) -> Work:
    text = Path(path).read_text(encoding="utf-8")
    train(kind, text[: 10**5])

    def work() -> dict[str, Any]:
        train(kind, text)
        return {}

    return work


def measure(task: str, path: Path, pipelines: Path | None) -> dict[str, Any]:
    other = {"PYTHONPATH": str(pipelines.resolve())} if pipelines else {}
    command = [sys.executable, __file__, "--here", task, str(path)]
    result: dict[str, Any] = last_line(command, TOKENIZERS_PARALLELISM="false", **other)
    result["load_average"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--here", nargs=2, metavar=("TASK", "PATH"), help="measure in this process")
    parser.add_argument("--pipelines", type=Path, help="the pipelines/ of another checkout")
    parser.add_argument("--most-files", type=int, default=max(NUM_FILES))
    parser.add_argument("--name", default="many_and_long", help="of the file of results")
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
        line.write_text(words(LINE_BYTES), encoding="utf-8")
        rows += [measure(task, line, arguments.pipelines) for task in TASKS]
        if not arguments.pipelines:
            small = Path(folder) / "small.txt"
            small.write_text(words(10_000), encoding="utf-8")
            rows += [prepare(path, Path(folder)) for path in (small, line, files)]
    figures = {
        "machine": f"{os.cpu_count()} cores, shared with other work",
        "line_megabytes": LINE_BYTES / 10**6,
        "rows": rows,
    }
    write_result(arguments.name, figures, PACKAGES)


if __name__ == "__main__":
    main()
