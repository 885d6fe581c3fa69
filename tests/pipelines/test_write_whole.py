"""Files that later commands trust: whole or not at all, on a disk that is full, too."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from threading import Thread

import pytest

from elastrata_pipelines.storage import write_atomically

OLD, NEW = b"steps: 1\n" * 9, b"steps: 2\n" * 99


@pytest.mark.parametrize("limit", [0, 1, len(OLD), len(NEW) - 1])
@pytest.mark.parametrize("is_there", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, limit: int, is_there: bool) -> None:
    path = tmp_path / "recipe.yaml"
    if is_there:
        path.write_bytes(OLD)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_atomically(path, NEW)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [OLD] * is_there
    write_atomically(path, NEW)
    assert path.read_bytes() == NEW


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(tmp_path / "file")
    write_atomically(path, OLD)
    write_atomically(path, NEW)
    assert path.is_symlink()
    assert (tmp_path / "file").read_bytes() == NEW


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    write_atomically(path, NEW)
    reader.join()
    assert read == [NEW]
    assert path.is_fifo()
