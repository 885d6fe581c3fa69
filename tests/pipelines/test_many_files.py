"""Many small files: the work grows with their number and no faster, and no process holds all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastrata_pipelines.preparation import SourceConfig
from elastrata_pipelines.preparation.documents import read_documents
from elastrata_pipelines.preparation.portions import group_files, read_portions
from elastrata_pipelines.preparation.sources import SourceFile, find_files

SIZE = 2 * 2**20


def small_files(count: int, size: int = 60) -> list[SourceFile]:
    return [
        SourceFile(
            source=0, url=f"/texts/{number}.txt", name=f"{number}.txt", bytes=size, kind="text",
            compression=None, stamp="",
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("size", [0, 1, 60, 600, 60_000])
def test_groups_are_few_and_bounded(size: int) -> None:
    groups = group_files(small_files(100_000, size), SIZE)
    assert [file.name for group in groups for file in group] == [f"{n}.txt" for n in range(100_000)]
    assert max(map(len, groups)) <= 2**14
    assert len(groups) <= 100_000 * size // SIZE + 100_000 // 2**14 + 1
    assert all(sum(file.bytes for file in group[:-1]) < SIZE for group in groups)


def test_groups_are_of_one_source() -> None:
    first, second = small_files(1, 10), small_files(1, 10)
    object.__setattr__(second[0], "source", 1)
    assert [len(group) for group in group_files([*first, *second], SIZE)] == [1, 1]
    assert group_files([], SIZE) == []


class Counted:
    """How often something of a portion is asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            return function(*arguments, **named)

        return counted


class CountedBytes(bytes):
    """Data that counts how often its size is looked at."""

    looked_at = 0

    def __len__(self) -> int:
        CountedBytes.looked_at += 1
        return super().__len__()


def test_each_file_is_opened_once_to_be_found_and_once_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        (tmp_path / f"{number:03d}.txt").write_text(f"text {number}", encoding="utf-8")
    finding, reading = Counted(), Counted()
    package = "elastrata_pipelines.preparation"
    for name, counted in (("sources", finding), ("pieces", reading)):
        module = __import__(f"{package}.{name}", fromlist=["open_regular"])
        monkeypatch.setattr(module, "open_regular", counted.around(module.open_regular))
    config = SourceConfig(paths=(str(tmp_path),), name="s")
    files = find_files(0, config).files
    (portion,) = read_portions(files, config, size=SIZE, max_document_bytes=SIZE)
    documents = read_documents(portion, config, max_document_bytes=SIZE).documents
    assert [document.text for document in documents] == [f"text {n}" for n in range(300)]
    assert (finding.calls, reading.calls) == (300, 300)
