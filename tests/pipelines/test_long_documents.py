"""Long documents: from the file to a run of samples in memory of a few times their size."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation.pipeline import _row, _Stage, _values
from elastrata_pipelines.preparation.portions import Group, ReadWork
from elastrata_pipelines.preparation.sources import find_files
from elastrata_pipelines.preparation.training import train_tokenizer
from elastrata_pipelines.preparation.work import TokenizedPortion, TokenizeWork
from elastrata_pipelines.storage import Storage

Measure = Callable[[], AbstractContextManager[list[int]]]


def write_long_line(path: Path, size: int) -> None:
    """Write a line of words of `size` bytes."""
    rng = random.Random(3)
    known = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 11))) for _ in range(5000)]
    path.write_text(" ".join(rng.choices(known, k=size // 6))[:size], encoding="utf-8")


@contextmanager
def traced() -> Iterator[list[int]]:
    """Measure the peak of what Python and NumPy allocate: the same on every machine."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@contextmanager
def resident() -> Iterator[list[int]]:
    """Measure by how much the process grows: it depends on what was freed before, on allocators and
    on the kernel."""
    peak: list[int] = []
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is counted from here
    before = memory("VmRSS")
    yield peak
    peak.append(memory("VmHWM") - before)


def tokenized(
    path: Path, packing: str, runs: Path, measure: Measure
) -> tuple[TokenizedPortion, int]:
    """Return what becomes of a file, through the rows that pass from process to process, and the
    bytes of memory that it takes."""
    kind = "wordpiece" if packing == "none" else "bpe"
    config = PrepareConfig.model_validate(
        {
            "sources": [{"paths": str(path)}],
            "tokenizer": {"train": kind, "vocab_size": 2000},
            "seq_len": 128,
            "held_out": 0.01,
            "packing": packing,
        }
    )
    files = train_tokenizer(
        [path.read_text(encoding="utf-8")[: 10**5]], config.tokenizer, seq_len=128
    )
    work = TokenizeWork(
        config=config, tokenizer_json=files.tokenizer_json, frame=files.frame(), pair_frame=None,
        token_dtype="uint16", unknown_id=None, runs=Storage(str(runs)),
    )  # fmt: skip
    read, tokenize = _Stage(ReadWork(config, 2**21)), _Stage(lambda portion: (work(portion),))
    group = Group(0, tuple(find_files(0, config.all_sources[0]).files))
    with measure() as peak:
        rows = [row for table in read(_row(group)) for row in tokenize(table)]
    (found,) = (value for row in rows for value in _values(row))
    return found, peak[0]


def memory(key: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(key))) * 1024


@pytest.mark.parametrize(
    ("packing", "measure", "megabytes", "most_times"),
    [
        ("best_fit", traced, 8, 5.7),  # measured: 5.1; with a copy of the text 6.1
        # Measured: 5.9 and less; with copies of text, ids and samples beside one another 7 and more
        *(
            pytest.param(packing, resident, 24, 6.4, marks=pytest.mark.matrix)
            for packing in ("best_fit", "none", "concat")
        ),
    ],
)
def test_a_long_line_takes_a_few_times_its_memory(
    tmp_path: Path, packing: str, measure: Measure, megabytes: int, most_times: float
) -> None:
    first, line = tmp_path / "first.txt", tmp_path / "line.txt"
    write_long_line(first, 10**5)
    tokenized(first, packing, tmp_path / "runs of the first", measure)  # it loads libraries
    write_long_line(line, megabytes * 10**6)
    found, peak = tokenized(line, packing, tmp_path / "runs", measure)
    assert found.bytes == megabytes * 10**6
    assert found.documents in ((1, 0), (0, 1))
    assert peak < most_times * found.bytes
