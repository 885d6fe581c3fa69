"""Archives, files that are no text, and what a source of them gives."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy

from elastrata_pipelines.preparation import SourceConfig
from elastrata_pipelines.preparation.documents import Document, read_documents
from elastrata_pipelines.preparation.portions import group_files, read_portions
from elastrata_pipelines.preparation.sources import find_files


def tar(members: Mapping[str, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    """An archive with a folder, a link and a hidden file besides."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form, encoding="utf-8") as archive:
        for name, kind in (("texts", tarfile.DIRTYPE), ("link.txt", tarfile.SYMTYPE)):
            other = tarfile.TarInfo(name)
            other.type, other.linkname = kind, "nowhere"
            archive.addfile(other)
        for name, data in {"._hidden.txt": b"\0\5", **members}.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def parquet(*texts: str) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink)
    return sink.getvalue()


def read(
    path: Path, *, size: int = 2**20, skip: bool = False, limit: int = 2**20, **settings: Any
) -> tuple[list[Document], list[str], int]:
    """Documents, problems (without their folder) and the number of things left out."""
    config = SourceConfig.model_validate({"paths": str(path), "name": "s", **settings})
    files = find_files(0, config).files
    documents: list[Document] = []
    problems: list[str] = []
    left_out = 0
    for group in group_files(files, size):
        for part in read_portions(group, config, size=size, max_document_bytes=limit, skip=skip):
            found = read_documents(part, config, max_document_bytes=limit)
            documents += found.documents
            problems += [*found.fatal, *found.problems]
            left_out += part.left_out
    folder = path if path.is_dir() else path.parent
    return documents, [line.replace(f"{folder}/", "") for line in problems], left_out


def zipped() -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.txt", "text")
    return sink.getvalue()


def arrow(*, as_stream: bool) -> bytes:
    sink, table = io.BytesIO(), pa.table({"text": ["x"]})
    new = pa.ipc.new_stream if as_stream else pa.ipc.new_file
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


PAGE = b"\xef\xbb\xbf\n <!-- 404 -->\n<!DOCTYPE html>\n<html><title>Not found</title></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4" * 64 + b"\nsize 12345\n"
ANNEX = b"/annex/objects/SHA256E-s5--ab.txt\n"
XML = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>NoSuchKey</Code></Error>'
NO_TEXTS: dict[str, tuple[bytes, str]] = {
    "gzip": (gzip.compress(b"text"), "gzip data"),
    "gzip twice": (gzip.compress(gzip.compress(b"text")), "gzip data"),
    "bzip2": (bz2.compress(b"text"), "bzip2 data"),
    "xz": (lzma.compress(b"text"), "xz data"),
    "zstd": (zstd(b"text"), "Zstandard data"),
    "lz4": (bytes(pa.compress(b"text", codec="lz4", asbytes=True)), "LZ4 data"),
    "zip": (zipped(), "a zip archive"),
    "pdf": (b"%PDF-1.7\n1 0 obj", "a PDF"),
    "parquet": (parquet("x"), "Parquet"),
    "arrow": (arrow(as_stream=False), "Arrow data"),
    "arrow stream": (arrow(as_stream=True), "Arrow data"),
    "safetensors": (safetensors.numpy.save({"a": np.zeros(99)}), "weights"),
    "pickle": (pickle.dumps({"text": "x" * 99}), "a pickle"),
    "page": (PAGE, "an HTML page"),
    "error": (XML, "an HTML page"),
    "lfs": (LFS, "a pointer of Git LFS"),
    "annex": (ANNEX, "a pointer of git-annex"),
    "annex link": (b"../.git/annex/objects/zQ/3f/SHA256E-s1--a/SHA256E-s1--a", "git-annex"),
    "utf-16": ("text".encode("utf-16"), "UTF-16"),
    "utf-32": ("text".encode("utf-32"), "UTF-32"),
    "utf-16 without a mark": ("some text\n".encode("utf-16-le"), "binary data"),
    "control characters": (bytes(range(128)) * 50, "binary data"),
    "zeros": (bytes(9999), "binary data"),
    "tar": (tar({"a.txt": b"text"}), "a tar archive"),
}  # fmt: skip
"""Bytes that are no text, and what they are called."""
