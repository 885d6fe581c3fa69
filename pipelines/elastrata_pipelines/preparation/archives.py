"""Files and archives: reads a text file, or every member of a tar archive, as pieces.

Archives are read sequentially, one block at a time, with any compression and of any size. A member
is a file of the source with the name `ARCHIVE: MEMBER`, in the order of the archive.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from posixpath import splitext
from tempfile import TemporaryFile
from typing import Any

from elastrata_pipelines.checked_json import describe_error
from elastrata_pipelines.errors import escape_unprintable
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.local_files import is_sidecar
from elastrata_pipelines.preparation.not_text import HEAD_BYTES, refuse_no_text, refuse_not_packed
from elastrata_pipelines.preparation.pieces import (
    DocumentTooLongError,
    Piece,
    open_stored,
    open_uncompressed,
    refuse_bomb,
    text_pieces,
)
from elastrata_pipelines.preparation.sources import COMPRESSIONS, SourceFile, kind_of
from elastrata_pipelines.preparation.tables import parquet_pieces

_ENDINGS = (".tar", *(ending for ending in COMPRESSIONS if ending.startswith(".t")))
# Bounds nested archives, which may be malicious.
_DEEPEST = 4
_BLOCK = tarfile.BLOCKSIZE
_MOST_HEADER_BYTES = 2**20
_LONG_HEADERS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


@dataclass(frozen=True)
class RefusedMember:
    """An archive member that cannot be read."""

    name: str
    """Identity of the member, like `SourceFile.name`."""
    problem: str
    """Line about the problem."""
    is_sidecar: bool = False
    """Whether it was passed over as a file beside the data, which is no problem."""


@dataclass(frozen=True)
class FileReader:
    """Reads files of one source."""

    config: SourceConfig
    size: int
    """Approximate size of a piece in bytes."""
    max_document_bytes: int
    """Maximum size of a document."""
    refused: Collection[str] = ()
    """Identities of members that are not read."""

    def pieces(self, file: SourceFile) -> Iterator[Piece | RefusedMember]:
        """Yield the pieces of a file, or of the members of an archive, in order.

        Raises:
            DocumentTooLongError: a document is longer than `max_document_bytes`.
            Exception: the file cannot be read, or is not text.
        """
        with open_stored(file) as stored, self._uncompressed(file, stored) as stream:
            yield from self._pieces(file, stream, 0)

    @contextmanager
    def _uncompressed(self, file: SourceFile, stored: Any) -> Iterator[Any]:
        if file.compression:
            refuse_not_packed(file, _peek(stored), self.config)
        with open_uncompressed(stored, file.compression) as stream:
            yield stream

    def _pieces(self, file: SourceFile, stream: Any, level: int) -> Iterator[Piece | RefusedMember]:
        head = _read(stream, HEAD_BYTES)
        rest = _ResumedStream(head, stream)
        if _is_archive(file, head, level, self.config):
            if level == _DEEPEST:
                raise OSError(f"archives in archives, more than {_DEEPEST} deep; unpack it")
            for member, data in _members(file, rest, self.config):
                if data is None:
                    yield RefusedMember(member.name, "", is_sidecar=True)
                else:
                    yield from self._member_pieces(member, data, level + 1)
        elif file.kind == "parquet":
            if not head.startswith(b"PAR1"):
                refuse_no_text(file, head, self.config)
            with _seekable(file, rest, stream, level) as whole:
                yield from parquet_pieces(file, whole, self.config, self.size)
        else:
            refuse_no_text(file, head, self.config)
            yield from text_pieces(file, rest, self.config, self.size, self.max_document_bytes)

    def _member_pieces(
        self, member: SourceFile, data: Any, level: int
    ) -> Iterator[Piece | RefusedMember]:
        if member.name in self.refused:
            yield RefusedMember(member.name, "")
            return
        try:
            with self._uncompressed(member, data) as stream:
                yield from self._pieces(member, stream, level)
        except DocumentTooLongError:
            raise
        # Every compression and format raises errors of other classes.
        except Exception as error:
            why = escape_unprintable(describe_error(error))
            yield RefusedMember(member.name, f"{member.shown}: cannot be read ({why})")


def has_archive_name(file: SourceFile) -> bool:
    """Return whether the name of a file is that of a tar archive."""
    stem, ending = splitext(file.url.lower())
    return ending in _ENDINGS or (ending in COMPRESSIONS and stem.endswith(".tar"))


def _is_archive(file: SourceFile, head: bytes, level: int, config: SourceConfig) -> bool:
    if head[257:262] == b"ustar" or _begins_archive(head):
        if not (file.compression or level or has_archive_name(file)):
            raise OSError("a tar archive, not text; end its name in .tar")
        return True
    if has_archive_name(file) and (not head or head.strip(b"\0")):
        refuse_no_text(file, head, config)
        raise OSError("its name says that it is a tar archive, which it is not")
    return has_archive_name(file)


def _begins_archive(head: bytes) -> bool:
    """Return whether the bytes begin with a tar header of the format before POSIX."""
    try:
        # The old format has no magic number; only the checksum of the header identifies it.
        tarfile.TarInfo.frombuf(head[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _members(
    file: SourceFile, stream: Any, config: SourceConfig
) -> Iterator[tuple[SourceFile, Any]]:
    """Yield the files in an archive that are not empty, with streams to be read immediately;
    None for those beside the data.

    Raises:
        Exception: the archive is damaged or truncated.
    """
    # The caller closes the stream.
    archive: Any = tarfile.open(  # noqa: SIM115
        fileobj=stream, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
    )
    number = 0
    while (header := archive.next()) is not None:
        # tarfile would keep the headers of all members.
        archive.members.clear()
        refuse_bomb(file, header.offset_data + header.size)
        number += 1
        if header.isfile() and header.size:
            kind, compression = kind_of(header.name, config)
            member = replace(
                file,
                url=f"{file.url}: {header.name}",
                # Numbered, since two members may have the same path.
                name=f"{file.name}:{number}:{header.name}",
                bytes=header.size,
                kind=kind,
                compression=compression,
            )
            yield member, None if is_sidecar(header.name) else archive.extractfile(header)
    # Read to the end: a concatenated second archive must not be ignored, and compressed streams
    # verify their checksums there.
    while rest := archive.fileobj.read(2**16):
        if rest.strip(b"\0"):
            raise OSError("more follows after the archive's end (a second one?); unpack it")


class _Header(tarfile.TarInfo):
    """Tar header that must be complete."""

    # `tarfile` itself takes a damaged or missing header for the end of the archive.
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if len(buf) == _BLOCK and not buf.strip(b"\0"):
            # Raises the error that marks the end.
            return super().frombuf(buf, encoding, errors)
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise OSError(f"the tar archive is cut off or damaged: {error}") from None
        if header.type in _LONG_HEADERS and header.size > _MOST_HEADER_BYTES:
            raise OSError(f"the tar archive is damaged: a header of {header.size:,} bytes")
        return header


class _ResumedStream:
    """A stream whose first bytes were already read, from its start on."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end."""
        if not self._head:
            return bytes(self._stream.read(size))
        head, self._head = self._head[:size], self._head[size:]
        return head if self._head else head + _read(self._stream, size - len(head))


def _peek(stored: Any) -> bytes:
    """Return the first bytes of a stream without moving its position."""
    # Archive members cannot seek back.
    if hasattr(stored, "peek"):
        return bytes(stored.peek(HEAD_BYTES)[:HEAD_BYTES])
    head = _read(stored, HEAD_BYTES)
    stored.seek(0)
    return head


def _read(stream: Any, size: int) -> bytes:
    """Return `size` bytes, or fewer at the end of the stream."""
    # A stream may return fewer bytes than requested at any time.
    data = b""
    while len(data) < size and (block := stream.read(size - len(data))):
        data += block
    return data


@contextmanager
def _seekable(file: SourceFile, rest: _ResumedStream, stream: Any, level: int) -> Iterator[Any]:
    """Yield a seekable file, which is a temporary copy if the stream is not seekable."""
    if not level and not file.compression:
        stream.seek(0)
        yield stream
        return
    with TemporaryFile() as copy:
        while block := rest.read(2**20):
            copy.write(block)
            refuse_bomb(file, copy.tell())
        copy.seek(0)
        yield copy
