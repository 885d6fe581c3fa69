"""Damaged files, where bad ones are skipped: left out whole, however the work is divided."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastrata_pipelines.preparation import PrepareConfig
from elastrata_pipelines.preparation.portions import Group, ReadWork, portion_bytes
from elastrata_pipelines.preparation.provenance import UNREADABLE
from elastrata_pipelines.preparation.sources import find_files
from elastrata_pipelines.preparation.work import ChooseTrainingText, TrainingText

LINES = [f"line {number}: {random.Random(number).random()}" for number in range(3000)]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def parquet(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    table = pa.table({"text": data.decode().splitlines()})
    pq.write_table(table, sink, write_page_checksum=True, row_group_size=500, compression="none")
    return bytes(sink.getvalue().to_pybytes())


KINDS: dict[str, Callable[[bytes], bytes]] = {
    ".txt.gz": gzip.compress,
    ".txt.bz2": bz2.compress,
    ".txt.xz": lzma.compress,
    ".txt.zst": zstd,
    ".parquet": parquet,
}


def cut_off(data: bytes) -> bytes:
    return data[: len(data) * 3 // 4]


def altered(data: bytes) -> bytes:
    at = len(data) * 3 // 4
    return data[:at] + bytes(byte ^ 255 for byte in data[at : at + 64]) + data[at + 64 :]


def chosen(folder: Path, size: int, files_in_a_group: int) -> tuple[list[str], Counter[str]]:
    """The texts and the counts of a corpus, read in portions of `size` by so many readers."""
    config = PrepareConfig.model_validate(
        {
            "sources": [{"paths": str(folder), "documents": "line"}],
            "tokenizer": {"train": "bpe"},
            "seq_len": 8,
            "bad_documents": "skip",
        }
    )
    files = find_files(0, config.all_sources[0]).files
    groups = [files[i : i + files_in_a_group] for i in range(0, len(files), files_in_a_group)]
    read, choose = ReadWork(config, size), ChooseTrainingText(config, 1.0)
    results: list[TrainingText] = [
        choose(portion)
        for number, group in enumerate(groups)
        for portion in read(Group(number, tuple(group)))
    ]
    assert not any(result.problems for result in results)
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result.skipped)
    return [text for result in results for _, text in result.chosen], counts


@pytest.mark.parametrize("damage", [cut_off, altered])
@pytest.mark.parametrize("ending", KINDS)
def test_a_damaged_file_is_left_out_whole(
    tmp_path: Path, ending: str, damage: Callable[[bytes], bytes]
) -> None:
    data = KINDS[ending]("\n".join(LINES).encode())
    (tmp_path / f"a{ending}").write_bytes(data)
    (tmp_path / f"b{ending}").write_bytes(damage(data))
    (tmp_path / "c.txt").write_text("the last", encoding="utf-8")
    for size in (2**10, 2**14, portion_bytes(0)):
        for files_in_a_group in (1, 3):
            texts, counts = chosen(tmp_path, size, files_in_a_group)
            assert texts == [*LINES, "the last"]
            assert counts == {UNREADABLE: 1}


@pytest.mark.parametrize("ending", [".txt.gz", ".txt.bz2", ".txt.xz", ".txt.zst"])
def test_streams_one_after_another_are_read_to_the_last(tmp_path: Path, ending: str) -> None:
    """Several streams are one text; what follows and is none of them is damage, not the end."""
    half = len(LINES) // 2
    parts = ["\n".join(part).encode() for part in (LINES[:half], ["", *LINES[half:]])]
    first, second = map(KINDS[ending], parts)
    (tmp_path / f"a{ending}").write_bytes(first + second)
    assert chosen(tmp_path, 2**12, 1) == (LINES, {})
    (tmp_path / f"a{ending}").write_bytes(first + b"x" + second[1:])
    (tmp_path / "c.txt").write_text("the last", encoding="utf-8")
    assert chosen(tmp_path, 2**12, 1) == (["the last"], {UNREADABLE: 1})
