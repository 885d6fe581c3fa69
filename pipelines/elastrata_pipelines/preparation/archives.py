"""Files and what is in them: a text is one thing, a tar archive holds many, each read as a file.

Archives are read from front to back, a block at a time, whatever they are compressed with and
however large they are; a member is a file of the source, `ARCHIVE: MEMBER`, in the archive's order.
"""

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from posixpath import splitext
from tempfile import TemporaryFile
from typing import Any

from elastrata_pipelines.checked_json import reason
from elastrata_pipelines.errors import in_one_line
from elastrata_pipelines.preparation.config import SourceConfig
from elastrata_pipelines.preparation.not_text import HEAD_BYTES, refuse_no_text, refuse_not_packed
from elastrata_pipelines.preparation.pieces import (
    DocumentTooLongError,
    Piece,
    open_stored,
    refuse_bomb,
    text_pieces,
    uncompressed,
)
from elastrata_pipelines.preparation.sources import COMPRESSIONS, SourceFile, is_hidden, kind_of
from elastrata_pipelines.preparation.tables import parquet_pieces

_ENDINGS = (".tar", *(ending for ending in COMPRESSIONS if ending.startswith(".t")))
_DEEPEST = 4
_BLOCK = tarfile.BLOCKSIZE
_MOST_HEADER_BYTES = 2**20
_LONG_HEADERS = (
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
)  # fmt: skip


@dataclass(frozen=True)
class Refused:
    """A member of an archive that cannot be read."""

    name: str
    """Its identity, as that of a `SourceFile`."""
    problem: str
    """The line about it."""


@dataclass(frozen=True)
class FileReader:
    """Reads files of one source."""

    config: SourceConfig
    size: int
    """Of a piece, about, in bytes."""
    max_document_bytes: int
    """A longer document is refused."""
    refused: Collection[str] = ()
    """Members to leave unread, by their identities."""

    def pieces(self, file: SourceFile) -> Iterator[Piece | Refused]:
        """Return the pieces of a file, or of the members of an archive, in order.

        Raises:
            DocumentTooLongError: a document is longer than `max_document_bytes`.
            Exception: of a file that cannot be read, or that is no text.
        """
        with open_stored(file.url) as stored, self._uncompressed(file, stored) as stream:
            yield from self._pieces(file, stream, 0)

    @contextmanager
    def _uncompressed(self, file: SourceFile, stored: Any) -> Iterator[Any]:
        if file.compression:
            refuse_not_packed(file, _peek(stored), self.config)
        with uncompressed(stored, file.compression) as stream:
            yield stream

    def _pieces(self, file: SourceFile, stream: Any, level: int) -> Iterator[Piece | Refused]:
        head = _read(stream, HEAD_BYTES)
        rest = _Begun(head, stream)
        if _is_archive(file, head, level, self.config):
            if level == _DEEPEST:
                raise OSError(f"archives in archives, more than {_DEEPEST} deep; unpack it")
            for member, data in _members(file, rest, self.config):
                yield from self._of_member(member, data, level + 1)
        elif file.kind == "parquet":
            if not head.startswith(b"PAR1"):
                refuse_no_text(file, head, self.config)
            with _seekable(file, rest, stream, level) as whole:
                yield from parquet_pieces(file, whole, self.config, self.size)
        else:
            refuse_no_text(file, head, self.config)
            yield from text_pieces(file, rest, self.config, self.size, self.max_document_bytes)

    def _of_member(self, member: SourceFile, data: Any, level: int) -> Iterator[Piece | Refused]:
        if member.name in self.refused:
            yield Refused(member.name, "")
            return
        try:
            with self._uncompressed(member, data) as stream:
                yield from self._pieces(member, stream, level)
        except DocumentTooLongError:
            raise
        except Exception as error:  # every compression and format has its own
            why = in_one_line(reason(error))
            yield Refused(member.name, f"{member.shown}: cannot be read ({why})")


def names_archive(file: SourceFile) -> bool:
    """Whether a file is called a tar archive."""
    stem, ending = splitext(file.url.lower())
    return ending in _ENDINGS or (ending in COMPRESSIONS and stem.endswith(".tar"))


def _is_archive(file: SourceFile, head: bytes, level: int, config: SourceConfig) -> bool:
    if head[257:262] == b"ustar" or _begins_archive(head):
        if not (file.compression or level or names_archive(file)):
            raise OSError("a tar archive, not text; end its name in .tar")
        return True
    if names_archive(file) and (not head or head.strip(b"\0")):
        refuse_no_text(file, head, config)
        raise OSError("its name says that it is a tar archive, which it is not")
    return names_archive(file)


def _begins_archive(head: bytes) -> bool:
    """Whether a header as tar had it before POSIX begins there: nothing but its checksum tells."""
    try:
        tarfile.TarInfo.frombuf(head[:_BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def _members(
    file: SourceFile, stream: Any, config: SourceConfig
) -> Iterator[tuple[SourceFile, Any]]:
    """The files in an archive that are not hidden, and their bytes, to be read at once.

    Raises:
        Exception: the archive is damaged or cut off.
    """
    archive: Any = tarfile.open(  # noqa: SIM115  the stream is closed by who opened it
        fileobj=stream, mode="r|", tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
    )
    number = 0
    while (header := archive.next()) is not None:
        archive.members.clear()  # it would remember all of them
        refuse_bomb(file, header.offset_data + header.size)
        number += 1
        if header.isfile() and header.size and not is_hidden(header.name):
            kind, compression = kind_of(header.name, config)
            member = replace(
                file,
                url=f"{file.url}: {header.name}",
                name=f"{file.name}:{number}:{header.name}",  # two may have the same path
                bytes=header.size,
                kind=kind,
                compression=compression,
            )
            yield member, archive.extractfile(header)
    while rest := archive.fileobj.read(2**16):
        if rest.strip(b"\0"):
            raise OSError("more follows after the archive's end (a second one?); unpack it")


class _Header(tarfile.TarInfo):
    """A header that is whole: `tarfile` takes a damaged or missing one for the archive's end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        if len(buf) == _BLOCK and not buf.strip(b"\0"):
            return super().frombuf(buf, encoding, errors)  # raises: the end
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            raise OSError(f"the tar archive is cut off or damaged: {error}") from None
        if header.type in _LONG_HEADERS and header.size > _MOST_HEADER_BYTES:
            raise OSError(f"the tar archive is damaged: a header of {header.size:,} bytes")
        return header


class _Begun:
    """A stream, from its start on, whose first bytes were read already."""

    def __init__(self, head: bytes, stream: Any) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        """The next `size` bytes; fewer only at the end."""
        if not self._head:
            return bytes(self._stream.read(size))
        head, self._head = self._head[:size], self._head[size:]
        return head if self._head else head + _read(self._stream, size - len(head))


def _peek(stored: Any) -> bytes:
    """The first bytes of a stream, which stays at its start."""
    if hasattr(stored, "peek"):  # members of archives cannot be read again
        return bytes(stored.peek(HEAD_BYTES)[:HEAD_BYTES])
    head = _read(stored, HEAD_BYTES)
    stored.seek(0)
    return head


def _read(stream: Any, size: int) -> bytes:
    """So many bytes, unless the stream ends before."""
    data = b""
    while len(data) < size and (block := stream.read(size - len(data))):
        data += block
    return data


@contextmanager
def _seekable(file: SourceFile, rest: _Begun, stream: Any, level: int) -> Iterator[Any]:
    """A file that can be read at any place: in a copy, if it comes from front to back alone."""
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
