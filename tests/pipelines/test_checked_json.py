"""The checked reader: whatever lies in a file's place takes one line that knows file and field."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from elastrata_pipelines.checked_json import (
    MOST_DEPTH,
    Record,
    parse_json,
    parse_record,
    read_bytes,
)
from elastrata_pipelines.errors import UserError
from elastrata_pipelines.storage import Storage


class Point(Record):
    x: int
    tags: tuple[str, ...] = ()


def _problem(folder: Path, most: int = 1000) -> str:
    with pytest.raises(UserError) as raised:
        read_bytes(Storage(str(folder)), "file", most=most)
    (line,) = raised.value.problems
    assert line.startswith(f"{folder}/file: ")
    return line


def test_only_a_regular_file_of_bounded_size_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = tmp_path / "file"
    path.mkdir()
    assert "a folder, expected a file" in _problem(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    assert "device, pipe or socket" in _problem(tmp_path)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)
        listener.bind("file")
        assert "device, pipe or socket" in _problem(tmp_path)
    path.unlink()
    path.symlink_to("file")
    assert "leads back to itself" in _problem(tmp_path)
    path.unlink()
    path.write_bytes(b"12345")
    assert "5 bytes, expected at most 4" in _problem(tmp_path, most=4)
    assert read_bytes(Storage(str(tmp_path)), "file", most=5) == b"12345"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_bytes(Storage(str(tmp_path)), "file")


def test_depth_is_bounded() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "f") is not None
    for depth in (MOST_DEPTH + 2, 900, 100_000):
        with pytest.raises(UserError, match="nested deeper"):
            parse_json("[" * depth + "]" * depth, "f")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe{}", b"[1] x", b"1" * 5000])
def test_what_is_no_json_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(UserError, match="file: not JSON"):
        parse_json(data, "file")


def test_every_bad_field_has_a_line() -> None:
    with pytest.raises(UserError) as raised:
        parse_record(Point, b'{"x": "7", "tags": [1], "y": 0}', "file", "make it again")
    assert raised.value.problems == (
        "file: x: '7': input should be a valid integer; make it again",
        "file: tags.0: 1: input should be a valid string; make it again",
        "file: y: unknown key; make it again",
    )
    with pytest.raises(UserError, match="x: missing"):
        parse_record(Point, b"{}", "file")
    with pytest.raises(UserError, match="expected a JSON object"):
        parse_record(Point, b"[]", "file")
